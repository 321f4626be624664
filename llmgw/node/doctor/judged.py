"""Findings from the survey's own rules: a check names the problems it is about, and what to say when there are none."""

from __future__ import annotations

from collections.abc import Iterator

from llmgw.node.doctor.check import FAIL, PASS, WARN, Number
from llmgw.node.doctor.patient import Patient
from llmgw.node.problems.memory import AGE
from llmgw.wire.control import Finding
from llmgw.wire.facts import Grade

#: A note is for the record: it makes no check fail.
OUTCOMES = {Grade.BAD: FAIL, Grade.WARN: WARN, Grade.NOTE: PASS, Grade.UNKNOWN: WARN}


def judged(patient: Patient, codes: tuple[str, ...], fine: str, **numbers: Number) -> Iterator[Finding]:
    """One finding for each problem whose code is, or begins with, one of `codes`; else that all is fine."""
    any_wrong = False
    for symptom in patient.symptoms:
        problem = symptom.problem
        if not any(problem.code == code or (code.endswith("-") and problem.code.startswith(code)) for code in codes):
            continue
        any_wrong = any_wrong or problem.grade is not Grade.NOTE
        yield Finding(
            check="",
            outcome=OUTCOMES.get(problem.grade, WARN),
            text=problem.text.replace(f" for {AGE}", ""),
            remedy=problem.remedy,
            subject=problem.subject,
            numbers=dict(numbers),
        )
    if not any_wrong:
        yield Finding(check="", outcome=PASS, text=fine, numbers=dict(numbers))
