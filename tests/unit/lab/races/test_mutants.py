"""The script that breaks waits: what it deletes, and how it finds a mutant again."""

from pathlib import Path

from lab.races.mutants import __main__ as script
from lab.races.mutants import waits
from lab.races.mutants.waits import SourceFile

SOURCE = """
class A:
    def f(self, first, launch):
        first.wait()
        axis.all_gather(own, out=parts).wait()
        with self._stream.context():
            out.copy_(source)
        self.copied = self._stream.device_work()
        self._flush(é, stream=side)
        barrier.wait("purpose")
        number = thread.wait()
        return Work(first.wait, lambda: source, lambda: launch().wait(), dist.all_reduce(out).wait, self.sum)

    def g(self, first, launch):
        first.wait()
        first.wait()
        return first.then(launch)
"""
WITHOUT_A_WAIT = [
    ("first.wait()", "None"),
    ("axis.all_gather(own, out=parts).wait()", "axis.all_gather(own, out=parts)"),
    ("self._stream.context()", waits.NO_CONTEXT),
    ("self._stream.device_work()", waits.NO_WORK),
    ("stream=side", ""),
    ("first.wait", "lambda: None"),
    ("lambda: source", "lambda: None"),
    ("launch().wait()", "launch()"),
    ("dist.all_reduce(out).wait", "(dist.all_reduce(out), lambda: None)[1]"),
    ("first.wait()", "None"),
    ("first.wait()", "None"),
    ("first.then(launch)", "(launch)()"),
]


def test_each_wait_is_deleted_by_itself_and_what_it_waits_for_is_still_launched():
    mutants = sorted(waits.mutants(SourceFile("a.py", SOURCE)), key=lambda mutant: mutant.start)
    assert [(m.deleted, m.replacement) for m in mutants] == WITHOUT_A_WAIT
    for mutant in mutants:
        broken = mutant.apply(SOURCE)
        compile(broken, "a.py", "exec")
        assert SOURCE.count(mutant.deleted) == broken.count(mutant.deleted) + (mutant.deleted not in mutant.replacement)


def test_every_mutant_that_is_listed_as_equivalent_exists():
    assert waits.EQUIVALENT.keys() <= {(mutant.path, mutant.deleted) for mutant in script.all_mutants([])}


def test_the_tests_of_every_detector_exist():
    for path, _, name in (test.partition("::") for tests in waits.DETECTORS.values() for test in tests):
        assert (script.ROOT / path).exists()
        assert not name or f"def {name}(" in (script.ROOT / path).read_text()


def test_a_test_that_fails_is_named_with_its_error(tmp_path: Path):
    (tmp_path / "test_a.py").write_text("def test_one():\n    assert 2 == 2\n\ndef test_other():\n    assert 1 == 2")
    assert script.run_tests(tmp_path, ["test_a.py"]).startswith("test_a.py::test_other: ")
