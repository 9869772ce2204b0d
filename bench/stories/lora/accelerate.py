import torch
from accelerate import Accelerator
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, get_scheduler

accelerator = Accelerator()
tokenizer = AutoTokenizer.from_pretrained("model")
data = load_dataset("notes").map(lambda rows: tokenizer(rows["text"]), batched=True, remove_columns="text")
collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
loader = DataLoader(data["train"], batch_size=8, shuffle=True, collate_fn=collate)
test_loader = DataLoader(data["test"], batch_size=8, collate_fn=collate)
model = get_peft_model(AutoModelForCausalLM.from_pretrained("model"), LoraConfig(task_type="CAUSAL_LM", r=8))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
model, optimizer, loader, test_loader = accelerator.prepare(model, optimizer, loader, test_loader)
schedule = accelerator.prepare(get_scheduler("linear", optimizer, 0, len(loader)))
model.train()
for batch in loader:
    accelerator.backward(model(**batch).loss)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
model.eval()
losses = []
for batch in test_loader:
    with torch.no_grad():
        losses.append(accelerator.gather_for_metrics(model(**batch).loss[None]))
accelerator.print("loss", torch.cat(losses).mean().item())
accelerator.unwrap_model(model).save_pretrained("adapters", is_main_process=accelerator.is_main_process)
