"""What a replay can be told: sizes of the server it models, speculation, and the cost of a step in virtual time."""

from __future__ import annotations

from dataclasses import dataclass

from hotplan.replay.trace import BLOCK_TOKENS

RATIOS = (4, 128)
MAX_STEP_TOKENS = 65536  # ragged ids of a plan are uint16
MAX_DRAFT_TOKENS = 9  # the speculative c4 ring keeps the last 10 tokens, so a verify step of 10 can be undone, not 11
MIN_WINDOW = 8  # a c4 window; plans may look up slots that far back


@dataclass(frozen=True)
class CostModel:
    """Virtual milliseconds of a forward step: a fixed part plus a part per token, whatever the kind of step.

    It only decides how arrivals interleave with steps. The defaults are of the order of a large MoE model on one node;
    they are no measurement.
    """

    fixed_ms: float = 6.0
    per_token_ms: float = 0.015

    def step_ms(self, tokens: int) -> float:
        return self.fixed_ms + self.per_token_ms * tokens


@dataclass(frozen=True)
class Settings:
    """Sizes in tokens unless said; raises ValueError naming the setting, what was expected and what came."""

    token_budget: int = 8192  # new tokens of one prefill or mixed step
    max_running: int = 64  # requests that hold a row of req_to_token
    page_size: int = 256  # swa_page_size, and the page of the full pool
    slots: int | None = None  # full token slots; None: 4 Mi, or twice the longest request
    state_slots: int | None = None  # SWA slots; None: a quarter of `slots`, or what one step can need
    window: int = 128  # sliding window whose SWA slots stay alive
    draft_tokens: int = 0  # speculation: a verify step checks this many drafts and the token before them
    accept_rate: float = 0.7  # chance that a draft is accepted, given that those before it were
    mixed: bool = False  # decode and verify tokens ride along in prefill steps
    pad_decode: bool = True  # decode batches are padded to CUDA-graph sizes with rows of request 0
    prefix_cache: bool = True
    req_ring: bool = False  # c4 ring addressed by request instead of by page (use_req_ring)
    seed: int = 0
    cost: CostModel = CostModel()

    def __post_init__(self) -> None:
        def need(ok: bool, name: str, expected: str) -> None:
            if not ok:
                raise ValueError(f"{name}: expected {expected}, got {getattr(self, name)}")

        need(1 <= self.token_budget <= MAX_STEP_TOKENS, "token_budget", f"1..{MAX_STEP_TOKENS}")
        need(0 <= self.draft_tokens <= MAX_DRAFT_TOKENS, "draft_tokens", f"0..{MAX_DRAFT_TOKENS}")
        most = min(MAX_STEP_TOKENS, MAX_STEP_TOKENS // self.step_tokens - 8)  # padding adds up to 7 rows
        need(1 <= self.max_running <= most, "max_running", f"1..{most} at {self.step_tokens} tokens a step")
        if self.mixed:
            most = self.max_running * self.step_tokens
            need(self.token_budget > most, "token_budget", f"more than {most} (every running request) with mixed steps")
        # A multiple of the rings and a divisor of a prompt block.
        pages = [n for n in (128, 256, BLOCK_TOKENS) if n % max(self.ring_sizes) == 0]
        need(self.page_size in pages, "page_size", f"one of {pages}")
        for name in ("slots", "state_slots"):
            value = getattr(self, name)
            need(value is None or self.page_size <= value < 2**31, name, f"{self.page_size}..2147483647 tokens")
        need(self.window >= MIN_WINDOW, "window", f"at least {MIN_WINDOW}")
        need(0.0 <= self.accept_rate <= 1.0, "accept_rate", "0..1")
        if self.req_ring and self.prefix_cache:
            raise ValueError(
                "req_ring: expected prefix_cache off, got on: a request's own ring does not hold the state of a prefix"
                " that another request computed"
            )

    @property
    def step_tokens(self) -> int:
        """New tokens of one request in a decode or verify step."""
        return self.draft_tokens + 1

    @property
    def ring_sizes(self) -> tuple[int, int]:
        """Rings of c4 and c128, as in the server: twice as long with speculation."""
        return (16, 256) if self.draft_tokens else (8, 128)
