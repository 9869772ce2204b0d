from datasets import load_dataset
from seed import seed
from trl import SFTConfig, SFTTrainer

import lockstep

data = load_dataset("chats")
recipe = {"learning_rate": 1e-3, "assistant_only_loss": True, "gradient_checkpointing": False}
arguments = SFTConfig("run", use_cpu=True, bf16=False, eval_strategy="epoch", seed=seed, **recipe)
trainer = SFTTrainer("model", arguments, train_dataset=data["train"], eval_dataset=data["validation"])
lockstep.train(*lockstep.from_trainer(trainer))
trainer.save_model("tuned")
