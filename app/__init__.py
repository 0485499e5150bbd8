"""What a person sees: commands, panes, reports and the analysis behind them. Never imports torch."""
