"""LS066: model never moved."""

import pytest
from rule_findings import lines

MADE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, size=8):
        super().__init__()
        self.layer = nn.Linear(size, 2)

    def forward(self, x):
        return self.layer(x){more}

def score(net, loader, device):
    net.eval()
    for x, y in loader:
        yield net(x.to(device)), y

def main(loader, ema, helper):
    device = {device}
    net = {made}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    {use}
    return list(score(net, loader, device)), optimizer
"""


GPU = "torch.device('cuda' if torch.cuda.is_available() else 'cpu')"


@pytest.mark.parametrize(
    ("device", "made", "use", "more", "number"),
    [
        ("'cpu'", "Net()", "print(net)", "", 0),
        ("helper.device", "Net()", "print(net)", "", 0),
        (GPU, "Net().to(device)", "pass", "", 0),
        (GPU, "Net()", "net.to(device)", "", 0),
        (GPU, "Net()", "net = net.to(device)", "", 0),
        (GPU, "Net()", "net = helper(net)", "", 0),
        (GPU, "Net()", "ema(net)", "", 0),
        (GPU, "Net()", "for part in net.parameters(): part.data = part.data.to(device)", "", 0),
        (GPU, "Net()", "net.train().to(device)", "", 0),
        (GPU, "Net()", "same = net.train()\n    same.to(device)", "", 0),
        (GPU, "Net()", "net.layer.to(device)", "", 0),
        (GPU, "Net()", "net._apply(lambda part: part.to(device))", "", 0),
        (GPU, "Net()", "net.register_forward_pre_hook(helper)", "", 0),
        (GPU, "Net()", "[part.to(device) for part in (net, ema)]", "", 0),
        (GPU, "Net()", "net = helper", "", 0),
        (GPU, "Net()", "ema.net = net", "", 0),
        (GPU, "Net()", "torch.set_default_device('cuda')", "", 0),
        (GPU, "Net()", "net.load_state_dict(torch.load('a.pt'), assign=True)", "", 0),
        (GPU, "Net()", "net.place()", "\n\n    def place(self):\n        self.cuda()", 0),
        (GPU, "nn.DataParallel(Net())", "pass", "", 0),
    ],
)
def test_a_model_that_is_never_moved(device, made, use, more, number):
    text = MADE.format(device=device, made=made, use=use, more=more)
    assert len(lines(text, "LS066")) == number
    within = f"    with torch.device(device):\n        net = {made}\n"
    assert not lines(text.replace(f"    net = {made}\n", within), "LS066")
