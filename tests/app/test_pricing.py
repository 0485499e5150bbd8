"""Prices: quoted, dated, and the user's own before ours."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from costlab.app import pricing
from costlab.probes.records import Environment, Gpu


def environment(name: str, device: str = "cuda", count: int = 2) -> Environment:
    return Environment(device=device, gpus=[Gpu(index=n, name=name) for n in range(count)] if name else [])


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COSTLAB_HOME", str(tmp_path))
    return tmp_path


def test_the_table_is_whole_and_dated() -> None:
    prices = pricing.builtin_prices()
    assert len({p.gpu for p in prices}) == len(prices) >= 8
    assert all(re.fullmatch(r"20\d\d-[01]\d", p.date) and p.source and p.per_hour > 0 for p in prices)


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100 SXM 80 GB"),
        ("NVIDIA A100-SXM4-40GB", "A100 SXM 40 GB"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe 80 GB"),
        ("NVIDIA B200", "B200"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_device_names_find_their_price(name: str, gpu: str) -> None:
    found = pricing.find(name, pricing.builtin_prices())
    assert found is not None
    assert found.gpu == gpu


@pytest.mark.parametrize("name", ["NVIDIA GH200 480GB", "NVIDIA L40", "NVIDIA T400", "NVIDIA GeForce RTX 4090", ""])
def test_no_price_is_guessed(name: str) -> None:
    quote, why = pricing.quote_for(environment(name), None)
    assert quote is None
    assert "--price" in why


def test_a_given_price_wins_and_says_so() -> None:
    quote, why = pricing.quote_for(environment("NVIDIA H200"), 2.5, "reserved, one year")
    assert quote is not None
    assert (quote.per_hour, quote.note, quote.per, why) == (2.5, "reserved, one year", "GPU-hour", "")


def test_cpu_runs_have_a_price_only_if_given() -> None:
    assert pricing.quote_for(environment("", "cpu"), None)[0] is None
    quote, _ = pricing.quote_for(environment("", "cpu"), 0.1)
    assert quote is not None
    assert quote.per == "rank-hour"


def test_the_users_table_goes_first(store: Path) -> None:
    entry = ["[[price]]", 'gpu = "ours"', 'match = ["H200"]', "per_hour = 1.25", 'currency = "EUR"']
    entry += ['date = "2026-12"', 'source = "contract"']
    (store / "prices.toml").write_text("\n".join(entry))
    quote, why = pricing.quote_for(environment("NVIDIA H200"), None)
    assert quote is not None
    assert (quote.per_hour, quote.currency, quote.date, why) == (1.25, "EUR", "2026-12", "")
    assert "contract" in quote.note
    other, _ = pricing.quote_for(environment("NVIDIA B200"), None)
    assert other is not None
    assert other.per_hour != 1.25


@pytest.mark.parametrize(
    "text", ["[[price]", '[[price]]\ngpu = "x"', '[[price]]\ngpu="x"\nmatch=[]\nper_hour=1\ndate=""\nsource=""', "\xff"]
)
def test_a_bad_table_is_named_and_ours_is_used(store: Path, text: str) -> None:
    (store / "prices.toml").write_bytes(text.encode("latin-1"))
    quote, why = pricing.quote_for(environment("NVIDIA H200"), None)
    assert quote is not None
    assert "prices.toml" in why


def test_unlike_gpus_have_no_common_price() -> None:
    mixed = Environment(device="cuda", gpus=[Gpu(index=0, name="NVIDIA H200"), Gpu(index=1, name="NVIDIA H100")])
    assert pricing.quote_for(mixed, None)[0] is None
