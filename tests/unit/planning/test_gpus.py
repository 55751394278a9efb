import pytest

from megatron_lancet.planning.sizes.gpus import GPUS, gpu_of_device


@pytest.mark.parametrize(
    ("device", "key"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA L40S", None),
        ("CPU", None),
    ],
)
def test_data_sheet_is_found_by_the_name_of_the_device(device, key):
    assert gpu_of_device(device) is (None if key is None else GPUS[key])
