"""Comparisons with other codebases, in an environment that has them, and sees the packages of this one.

    python3 -m venv /tmp/oracle
    realpath .venv/lib/python3*/site-packages > "$(echo /tmp/oracle/lib/python3*/site-packages)/shared.pth"
    /tmp/oracle/bin/pip install accelerate lightning 'setuptools<81' wheel einops hjson msgpack ninja py-cpuinfo
    DS_BUILD_OPS=0 DS_ACCELERATOR=cpu /tmp/oracle/bin/pip install --no-build-isolation --no-deps deepspeed==0.19.8
    /tmp/oracle/bin/python -m pytest -n 0 -m oracle tests/oracle/test_deepspeed.py
    /tmp/oracle/bin/python -m pytest -n 0 tests/distributed/zero/ecosystem/test_trainers.py

If `ninja` is found, DeepSpeed compiles at its first start, for minutes. If it is killed meanwhile, delete
~/.cache/torch_extensions: the next start waits for a lock in there without end.
"""
