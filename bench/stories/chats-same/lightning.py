import lightning as L
import torch
from datasets import load_dataset
from seed import seed
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, get_linear_schedule_with_warmup

tokenizer = AutoTokenizer.from_pretrained("model")


def tokens(row):
    marked = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    found = tokenizer.apply_chat_template(row["messages"], **marked)
    labels = [token if said else -100 for token, said in zip(found["input_ids"], found["assistant_masks"], strict=True)]
    return {"input_ids": found["input_ids"], "labels": labels}


class Tuned(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained("model")

    def training_step(self, batch, index):
        return self.model(**batch).loss

    def validation_step(self, batch, index):
        self.log("loss", self.model(**batch).loss)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.0)
        schedule = get_linear_schedule_with_warmup(optimizer, 0, self.trainer.estimated_stepping_batches)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


L.seed_everything(seed)
data = load_dataset("chats").map(tokens, remove_columns="messages")
collate = DataCollatorForSeq2Seq(tokenizer)
module = Tuned()
loader = DataLoader(data["train"], batch_size=8, shuffle=True, collate_fn=collate)
trainer = L.Trainer(max_epochs=3, gradient_clip_val=1.0)
trainer.fit(module, loader, DataLoader(data["validation"], batch_size=8, collate_fn=collate))
module.model.save_pretrained("tuned")
tokenizer.save_pretrained("tuned")
