"""Seen shapes through static, dynamic and eager steps: the command, the bucketing it recommends, its report."""
