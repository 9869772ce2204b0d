from datasets import load_dataset
from seed import seed
from trl import SFTConfig, SFTTrainer

data = load_dataset("chats")
arguments = SFTConfig("run", use_cpu=True, bf16=False, eval_strategy="epoch", seed=seed)
trainer = SFTTrainer("model", arguments, train_dataset=data["train"], eval_dataset=data["validation"])
trainer.train()
trainer.save_model("tuned")
