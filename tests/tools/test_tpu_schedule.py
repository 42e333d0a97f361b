"""Reading cycles out of a schedule."""

import pytest

from tools.tpu.schedule import Cost, Loop, parse

# A loop of one block of work (two copies, one product) that the other side of a branch replaces by a slower one.
DUMP = """
     0   :  { %s1 = smov 0 }
   0x1   : > { %p1 = scmp.lt.s32.totalorder %s1, 4 } /* comment with = vmatmul. in it */
   0x2   : > { %9 = sbr.rel (%p1) target bundleno = 11 (0xb), region = 3 }
   0x3   : > {}
   0x4   : > {}
   0x5   : > {}
   0x6   : > {}
   0x7   : > { %1 = dma.hbm_to_vmem %s1  ;;  %2 = vmatmul.mubr.bf16.gmra.mxu0 %v1 }
   0x8   : > { %3 = dma.hbm_to_vmem %s1 }
   0x9   : > {}
   0xa PF: > {}
   0xb   : > { %4 = sbr.rel (!%p1) target bundleno = 19 (0x13), region = 4 }
   0xc   : > {}
   0xd   : > {}
   0xe   : > {}
   0xf   : > {}
  0x10   : > { %5 = vmatmul.mubr.bf16.gmra.mxu0 %v1  ;;  %6 = dma.done.wait %s1, 4 }
  0x11   : > {}
  0x12   : > {}
  0x13   : > { %7 = sbr.rel (%p1) target bundleno = 1 (0x1), region = 5 }
  0x14   : > {}
  0x15   : > {}
  0x16   : > {}
  0x17   : > {}
  0x18   :  { %8 = smov 1 }
"""


@pytest.fixture
def schedule():
    return parse("kernel", DUMP)


def test_every_bundle_is_a_cycle_even_an_empty_one(schedule):
    assert len(schedule.bundles) == 25


def test_comments_do_not_count(schedule):
    assert schedule.count("matmuls") == 2


def test_waits_are_no_copies(schedule):
    assert schedule.count("dma_starts") == 2
    assert schedule.count("dma_waits") == 1


def test_a_loop_ends_with_the_delay_slots_of_its_branch(schedule):
    assert schedule.loops() == [Loop(1, 24)]
    assert schedule.main_loop() == Loop(1, 24)


def test_fastest_pass_skips_what_it_may(schedule):
    assert schedule.cheapest(Loop(1, 24)) == Cost(16, 0, 0)


def test_fastest_pass_does_the_work_that_is_asked_for(schedule):
    assert schedule.cheapest(Loop(1, 24), dma_starts=2, matmuls=1) == Cost(20, 2, 1)


def test_pass_through_a_line_includes_it(schedule):
    assert schedule.cheapest(Loop(1, 24), through=16) == Cost(19, 0, 1)


def test_no_pass_does_more_than_there_is(schedule):
    assert schedule.cheapest(Loop(1, 24), dma_starts=3) is None
