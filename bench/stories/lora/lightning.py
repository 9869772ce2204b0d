import lightning as L
import torch
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling

tokenizer = AutoTokenizer.from_pretrained("model")
data = load_dataset("notes").map(lambda rows: tokenizer(rows["text"]), batched=True, remove_columns="text")
collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)


class Tuned(L.LightningModule):
    def __init__(self):
        super().__init__()
        base = AutoModelForCausalLM.from_pretrained("model")
        self.model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=8))

    def training_step(self, batch, index):
        return self.model(**batch).loss

    def validation_step(self, batch, index):
        self.log("loss", self.model(**batch).loss)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-4)


module = Tuned()
loader = DataLoader(data["train"], batch_size=8, shuffle=True, collate_fn=collate)
L.Trainer(max_epochs=1).fit(module, loader, DataLoader(data["test"], batch_size=8, collate_fn=collate))
module.model.save_pretrained("adapters")
