import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import load_dataset
from seed import seed
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, get_scheduler

tokenizer = AutoTokenizer.from_pretrained("model")


def tokens(row):
    marked = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    found = tokenizer.apply_chat_template(row["messages"], **marked)
    labels = [token if said else -100 for token, said in zip(found["input_ids"], found["assistant_masks"], strict=True)]
    return {"input_ids": found["input_ids"], "labels": labels}


set_seed(seed)
accelerator = Accelerator()
data = load_dataset("chats").map(tokens, remove_columns="messages")
collate = DataCollatorForSeq2Seq(tokenizer)
loader = DataLoader(data["train"], batch_size=8, shuffle=True, collate_fn=collate)
test_loader = DataLoader(data["validation"], batch_size=8, collate_fn=collate)
model = AutoModelForCausalLM.from_pretrained("model")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
schedule = get_scheduler("linear", optimizer, 0, 3 * len(loader))
model, optimizer, loader, test_loader, schedule = accelerator.prepare(model, optimizer, loader, test_loader, schedule)
for _ in range(3):
    model.train()
    for batch in loader:
        accelerator.backward(model(**batch).loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.eval()
    losses = []
    for batch in test_loader:
        with torch.no_grad():
            losses.append(accelerator.gather_for_metrics(model(**batch).loss[None]))
    accelerator.print("loss", torch.cat(losses).mean().item())
accelerator.unwrap_model(model).save_pretrained("tuned", is_main_process=accelerator.is_main_process)
tokenizer.save_pretrained("tuned")
