from dataclasses import replace

from megatron_lancet.lab.check.layout import Layout, without_an_axis


def test_layout_has_data_parallel_ranks_to_share_experts_out_on():
    assert Layout(expert=2).fitted().num_ranks == 2
    assert Layout(tensor=2, expert=2, expert_tensor=1).fitted().data == 1
    assert Layout(tensor=2, expert=2, expert_tensor=2, pipeline=2).fitted().num_ranks == 8
    assert Layout(context=2, expert=2, expert_tensor=2, data=3).fitted().data == 4


def test_each_axis_is_removed_alone():
    layout = Layout(tensor=2, pipeline=2, virtual=2, expert=2, expert_tensor=2, sequence=True).fitted()
    less = dict(without_an_axis(layout))
    assert list(less) == ["SP", "TP", "EP", "ETP", "VPP", "PP"]
    assert not less["SP"].sequence
    assert less["SP"].tensor == 2
    # Four ranks of a stage share out the parts of experts, as before.
    assert less["TP"] == replace(layout, tensor=1, sequence=False, data=4)
    assert less["PP"].virtual == 1
    assert all(one.tensor * one.context * one.data % (one.expert * one.expert_tensor) == 0 for one in less.values())


def test_data_parallelism_that_experts_need_is_not_removed():
    assert [name for name, _ in without_an_axis(Layout(expert=2, data=2))] == ["EP"]
    assert [name for name, _ in without_an_axis(Layout(tensor=2, data=2))] == ["TP", "DP"]


def test_layout_is_written_as_flags():
    words = Layout(tensor=2, virtual=2, pipeline=2, sequence=True).words()
    assert "--sequence-parallel" in words
    assert words[words.index("--num-virtual-stages-per-pipeline-rank") + 1] == "2"
    assert str(Layout()) == "one rank"
    assert str(Layout(tensor=2, sequence=True)) == "TP 2, SP"
