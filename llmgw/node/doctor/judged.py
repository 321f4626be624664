"""Findings from the survey's own rules: a check names the problems it is about, and what to say when there are none."""

from __future__ import annotations

from collections.abc import Iterator

from llmgw.node.doctor.check import FAIL, PASS, WARN, Number
from llmgw.node.doctor.patient import Patient
from llmgw.node.problems.memory import AGE
from llmgw.wire.control import Finding
from llmgw.wire.facts import Grade


def judged(
    patient: Patient, codes: tuple[str, ...], fine: str, *, note: str = PASS, **numbers: Number
) -> Iterator[Finding]:
    """One finding for each problem whose code is, or begins with, one of `codes`; else that all is fine.

    `note` is the outcome of what the survey only notes: a person who asks may want to hear more of it.
    """
    outcomes = {Grade.BAD: FAIL, Grade.WARN: WARN, Grade.NOTE: note, Grade.UNKNOWN: WARN}
    any_told = False
    for symptom in patient.symptoms:
        problem = symptom.problem
        if not any(problem.code == code or (code.endswith("-") and problem.code.startswith(code)) for code in codes):
            continue
        any_told = True
        yield Finding(
            check="",
            outcome=outcomes[problem.grade],
            text=problem.text.replace(f" for {AGE}", ""),
            remedy=problem.remedy,
            subject=problem.subject,
            numbers=dict(numbers),
        )
    if not any_told:
        yield Finding(check="", outcome=PASS, text=fine, numbers=dict(numbers))
