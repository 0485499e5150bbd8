"""ResNet-50: bottleneck residual blocks of convolution, batch norm and ReLU (He et al. 2015, arXiv 1512.03385).

The stride sits on the 3x3 convolution ("v1.5"), as in the common reference implementations.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from costlab.probes.workloads.base import Workload, WorkloadContext, WorkloadError


@dataclass(frozen=True)
class ResNetConfig:
    """Stage depths and widths; `batch` and `image` are the defaults of that size."""

    depths: tuple[int, ...]
    width: int
    classes: int
    batch: int
    image: int
    flops_forward: float | None = None  # multiply-adds x 2 of one image, None: counted


SIZES = {
    "tiny": ResNetConfig((1, 1), 8, 16, 4, 32),
    "small": ResNetConfig((2, 2, 2, 2), 32, 100, 32, 96),
    "full": ResNetConfig((3, 4, 6, 3), 64, 1000, 128, 224),
}


class ConvBN(nn.Sequential):
    """Convolution without bias, then batch norm."""

    def __init__(self, cin: int, cout: int, kernel: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(cin, cout, kernel, stride, kernel // 2, bias=False)
        self.bn = nn.BatchNorm2d(cout)


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions with a residual; widens fourfold. x: [batch, channels, height, width]."""

    def __init__(self, cin: int, width: int, stride: int) -> None:
        super().__init__()
        cout = 4 * width
        self.conv1 = ConvBN(cin, width, 1)
        self.conv2 = ConvBN(width, width, 3, stride)
        self.conv3 = ConvBN(width, cout, 1)
        self.shortcut = ConvBN(cin, cout, 1, stride) if stride != 1 or cin != cout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """One residual block."""
        h = F.relu(self.conv1(x))
        h = F.relu(self.conv2(h))
        return F.relu(self.conv3(h) + self.shortcut(x))


class ResNet(nn.Module):
    """images [batch, 3, height, width] -> logits [batch, classes]."""

    def __init__(self, c: ResNetConfig) -> None:
        super().__init__()
        self.stem = ConvBN(3, c.width, 7, 2)
        stages: list[nn.Module] = []
        cin = c.width
        for i, depth in enumerate(c.depths):
            width = c.width * 2**i
            blocks = [Bottleneck(cin if j == 0 else 4 * width, width, 2 if i and j == 0 else 1) for j in range(depth)]
            stages.append(nn.Sequential(*blocks))
            cin = 4 * width
        self.stages = nn.ModuleList(stages)
        self.fc = nn.Linear(cin, c.classes)
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Stem, stages, global average pool, classifier."""
        h = F.max_pool2d(F.relu(self.stem(x)), 3, 2, 1)
        for stage in self.stages:
            h = stage(h)
        out: Tensor = self.fc(h.mean((2, 3)))
        return out


def classification_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross-entropy in fp32."""
    images, labels = batch
    return F.cross_entropy(model(images).float(), labels)


def make(ctx: WorkloadContext) -> Workload:
    """Build the workload of `ctx.size`; images are channels-last on CUDA, as the fast convolutions want them.

    Weights stay contiguous: FSDP2 shards no other layout.
    """
    if ctx.size not in SIZES:
        raise WorkloadError(f"resnet50 has no size '{ctx.size}'; there are: {', '.join(SIZES)}")
    c = SIZES[ctx.size]
    batch = ctx.batch or c.batch
    layout = torch.channels_last if ctx.device.type == "cuda" else torch.contiguous_format
    with torch.device(ctx.device):
        torch.manual_seed(ctx.seed)
        model = ResNet(c)
    generator = torch.Generator().manual_seed(ctx.seed * 1009 + ctx.rank)
    data = []
    for _ in range(2):
        images = torch.randn(batch, 3, c.image, c.image, generator=generator).to(ctx.device, memory_format=layout)
        labels = torch.randint(0, c.classes, (batch,), generator=generator).to(ctx.device)
        data.append((images, labels))
    return Workload(
        model=model,
        batch=lambda step: data[step % 2],
        loss=classification_loss,
        name="resnet50",
        title=f"resnet50 {ctx.size}",
        unit="samples",
        units_per_batch=batch,
        blocks=[f"stages.{i}.{j}" for i, depth in enumerate(c.depths) for j in range(depth)],
        dynamic=False,
        source="costlab.probes.workloads.resnet",
    )
