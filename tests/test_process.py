"""A process is known by more than its number."""

import os
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime

import psutil

from megatron.process import this_process


def test_this_process_is_described_as_others_see_it():
    here = this_process()
    assert here.pid == os.getpid()
    assert here.host == os.uname().nodename
    started = datetime.strptime(here.started, "%Y-%m-%d %H:%M:%S UTC").replace(tzinfo=UTC)
    assert abs(started.timestamp() - psutil.Process().create_time()) < 3


def test_a_process_runs_until_it_has_ended_even_if_nobody_has_collected_it():
    here = this_process()
    assert here.is_visible()
    assert here.is_running()
    ended = subprocess.Popen([sys.executable, "-c", "pass"], stdout=subprocess.PIPE)
    ended.stdout.read()
    psutil.Process(ended.pid).status()
    while psutil.Process(ended.pid).status() != psutil.STATUS_ZOMBIE:
        pass
    assert not replace(here, pid=ended.pid).is_running()
    ended.stdout.close()
    ended.wait()
    assert not replace(here, pid=ended.pid).is_running()


def test_a_number_that_another_process_has_got_is_not_the_same_process():
    here = this_process()
    assert not replace(here, ticks=here.ticks - 1).is_running()
    assert replace(here, pid=1, ticks=here.ticks).is_running() is False
    assert not replace(here, pid=10**30).is_running()


def test_a_process_of_another_machine_or_container_is_not_visible():
    here = this_process()
    assert not replace(here, kernel="another").is_visible()
    assert not replace(here, namespace="pid:[1]").is_visible()
