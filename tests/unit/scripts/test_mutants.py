"""The script that breaks waits: what it deletes, and how it finds a mutant again."""

from pathlib import Path

from scripts.mutants import __main__ as script
from scripts.mutants import waits
from scripts.mutants.mutant import SourceFile

SOURCE = """
class A:
    def f(self, first, launch):
        first.wait()
        axis.all_gather(own, out=parts).wait()
        with self._stream.context():
            out.copy_(source)
        self.copied = self._stream.device_handle()
        self._flush(é, stream=side)
        barrier.wait("purpose")
        number = thread.wait()
        return Handle(first.wait, lambda: source, lambda: launch().wait(), dist.all_reduce(out).wait, self.sum)

    def g(self, first, launch):
        first.wait()
        first.wait()
        return first.then(launch)
"""
WITHOUT_A_WAIT = [
    ("A.f", "first.wait()", "None"),
    ("A.f", "axis.all_gather(own, out=parts).wait()", "axis.all_gather(own, out=parts)"),
    ("A.f", "self._stream.context()", waits.NO_CONTEXT),
    ("A.f", "self._stream.device_handle()", waits.NO_HANDLE),
    ("A.f", "stream=side", ""),
    ("A.f", "first.wait", "lambda: None"),
    ("A.f", "lambda: source", "lambda: None"),
    ("A.f", "launch().wait()", "launch()"),
    ("A.f", "dist.all_reduce(out).wait", "(dist.all_reduce(out), lambda: None)[1]"),
    ("A.g", "first.wait()", "None"),
    ("A.g", "first.wait()", "None"),
    ("A.g", "first.then(launch)", "(launch)()"),
]


def test_each_wait_is_deleted_by_itself_and_what_it_waits_for_is_still_launched():
    mutants = sorted(waits.mutants(SourceFile("a.py", SOURCE)), key=lambda mutant: mutant.start)
    assert [(m.function, m.deleted, m.replacement) for m in mutants] == WITHOUT_A_WAIT
    for mutant in mutants:
        broken = mutant.apply(SOURCE)
        compile(broken, "a.py", "exec")
        assert SOURCE.count(mutant.deleted) == broken.count(mutant.deleted) + (mutant.deleted not in mutant.replacement)


def test_a_mutant_keeps_its_key_if_lines_move():
    moved = SOURCE.replace("class A:", "x = 1\n\n\nclass A:")
    found = [{script.key(m) for m in waits.mutants(SourceFile("a.py", source))} for source in (SOURCE, moved)]
    assert found[0] == found[1]
    assert len(found[0]) == len(WITHOUT_A_WAIT)


def test_every_mutant_that_is_listed_as_equivalent_exists():
    known = {script.key(mutant) for kind in script.KINDS for mutant in script.all_mutants(kind, [])}
    assert script.equivalents(script.EQUIVALENT).keys() <= known


def test_the_tests_of_every_detector_exist():
    assert all(
        (Path(script.ROOT) / test.split("::")[0]).exists() for tests in script.DETECTORS.values() for test in tests
    )
