"""Tests of what skills.json says have nothing to look at while it does not exist."""

import pytest

from tests.helpers.nano import NANO

SKILL_FILE = NANO / "skills.json"
needs_skill_file = pytest.mark.skipif(
    not SKILL_FILE.is_file(),
    reason="models/ember-nano has no skills.json: it was not evaluated",
)
