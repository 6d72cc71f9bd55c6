"""All cases in one class."""

from __future__ import annotations

from .answers import AnswerCases
from .begin import BeginCases
from .cancel import CancelCases
from .chords import ChordCases
from .claim import ClaimCases
from .dependencies import DependencyCases
from .leases import LeaseCases
from .query import QueryCases
from .quota import QuotaCases
from .replay import ReplayCases
from .results import ResultCases
from .revocations import RevocationCases
from .roundtrip import RoundTripCases
from .schedules import ScheduleCases, SqlScheduleCases
from .sessions import SessionCases
from .settle import SettleCases
from .sqlonly import SqlCases
from .terms import TermCases
from .topology import TopologyCases
from .transitions import TransitionCases
from .unique import UniqueCases
from .waits import WaitCases


class BrokerContract(
    RoundTripCases,
    ClaimCases,
    SettleCases,
    LeaseCases,
    BeginCases,
    SessionCases,
    DependencyCases,
    CancelCases,
    AnswerCases,
    RevocationCases,
    ResultCases,
    ChordCases,
    TermCases,
    ScheduleCases,
    QueryCases,
    ReplayCases,
    UniqueCases,
    QuotaCases,
    TopologyCases,
    TransitionCases,
    WaitCases,
    SqlCases,
    SqlScheduleCases,
):
    """The broker contract. A subclass names the store with a fixture ``store``."""
