"""A training run whose streams are checked, with `profile.check_streams`. `pretrain_gpt.py` starts it."""

import signal

import pretrain_gpt
from gpt.monitor.console import RunConsole
from lab.races.stream_checker import streams_checked
from parallel.world import rank_from_environment

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    RunConsole(is_quiet=rank_from_environment() > 0).say("streams are checked for races: every operation takes longer")
    pretrain_gpt.main(streams_checked)
