"""The Trainer of transformers with a tiny BERT; it makes the process group, DDP and the sampler itself."""

import os

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed


class Sentences(Dataset):
    """Tokens; the label says whether the first is among the larger half."""

    def __init__(self, n):
        self.ids = torch.randint(0, 40, (n, 8), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": int(self.ids[i, 0] >= 20)}


def main():
    set_seed(0)
    config = BertConfig(vocab_size=40, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    arguments = TrainingArguments(
        output_dir="trainer",
        num_train_epochs=3,
        per_device_train_batch_size=32 // int(os.environ.get("WORLD_SIZE", 1)),
        learning_rate=3e-3,
        logging_strategy="epoch",
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(BertForSequenceClassification(config), arguments, train_dataset=Sentences(256))
    trainer.train()
    if trainer.is_world_process_zero():
        trainer.save_model("trainer")


if __name__ == "__main__":
    main()
