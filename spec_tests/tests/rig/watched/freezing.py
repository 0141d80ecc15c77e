"""Style of fine-tuning: the trunk is frozen in the first steps; then it is thawed, joins the
optimizer as a second group, and the model is wrapped again. Keyword inputs with a mask.
"""

import frame
import torch
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Classifier(nn.Module):
    def __init__(self, vocab=60, dim=16):
        super().__init__()
        self.embeddings = nn.Embedding(vocab, dim, padding_idx=0)
        self.encoder = nn.TransformerEncoderLayer(dim, 2, 32, dropout=0.1, batch_first=True)
        self.pooler = nn.Linear(dim, dim)
        self.classifier = nn.Linear(dim, 3)

    def trunk(self):
        return [*self.embeddings.parameters(), *self.encoder.parameters()]

    def forward(self, input_ids, attention_mask, labels):
        hidden = self.encoder(self.embeddings(input_ids), src_key_padding_mask=attention_mask == 0)
        weights = attention_mask.unsqueeze(-1) / attention_mask.sum(1)[:, None, None]
        logits = self.classifier(torch.tanh(self.pooler((hidden * weights).sum(1))))
        return nn.functional.cross_entropy(logits, labels), logits


def load_pretrained(model):
    """Load what stands for a downloaded trunk: equal on every rank."""
    generator = torch.Generator().manual_seed(7)
    for param in model.trunk():
        param.data.add_(torch.randn(param.shape, generator=generator), alpha=0.02)


def batches(seed, rank, world):
    """Yield every `world`-th batch of one seeded order, starting at this rank's."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 60, (64 * world, 4, 10), generator=generator)
    lengths = torch.randint(3, 11, (64 * world, 4, 1), generator=generator)
    mask = (torch.arange(10) < lengths).long()
    for i in range(rank, 64 * world, world):
        yield {"input_ids": ids[i] * mask[i], "attention_mask": mask[i], "labels": ids[i, :, 0] % 3}


def main():
    args = frame.arguments()
    rank, world = frame.start()
    torch.manual_seed(args.seed)
    net = Classifier()
    load_pretrained(net)
    for param in net.trunk():
        param.requires_grad_(False)
    model = DDP(net)
    trainable = [param for param in net.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-2)
    torch.manual_seed(args.seed + 1 + rank)
    thaw_at = max(1, min(2, args.steps // 2))
    for step, batch in zip(range(args.steps), batches(args.seed, rank, world), strict=False):
        if step == thaw_at:
            for param in net.trunk():
                param.requires_grad_(True)
            model = DDP(net)
            optimizer.add_param_group({"params": net.trunk(), "lr": 1e-3})
        loss, _ = model(**batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    frame.end(rank, net)


main()
