"""A training run whose streams are checked, with `profile.check_streams`. `pretrain_gpt.py` starts it."""

import signal

import pretrain_gpt
from lab.races.stream_checker import streams_checked

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    pretrain_gpt.main(streams_checked)
