"""Adapters on a pretrained language model, and the model with them: python examples/lora.py --max-steps 200

Needs the extras `hf` and `peft`. --model-name is a hub's model or a folder, --dataset-name a hub's dataset, a file or a
folder; other flags are those of `lockstep train`: --lora.rank 16, --lora.targets 'q_proj, v_proj', --seq-len 512.
Afterwards: lockstep generate outputs/tuned --prompt "...", and lockstep export outputs/tuned whole --format hf --merge.
"""

from pathlib import Path

from peft import PeftModel
from transformers import AutoModelForCausalLM

import lockstep
from lockstep import cli


def main():
    names = {"model_name": "openai-community/gpt2", "dataset_name": "tatsu-lab/alpaca", "experiment_name": "tuned"}
    plan = {"preset": "none", "num_epochs": 1, "batch_size": 16, "eval_freq": "20%"}
    config = lockstep.Config.from_args(model={"pretrained": True}, lora={"rank": 8}, **names, **plan)
    with lockstep.Run(config) as run:
        for step in run:
            if step.evaluation and run.is_main:
                print(f"step {step.global_step}: evaluation loss {step.evaluation.loss:.4f}")
    if not run.is_main or run.status != "finished":
        return
    adapters = Path(config.save_dir, f"{config.experiment_name}-adapters")
    if not adapters.exists():
        cli.dispatch(["export", str(run.result.folder), str(adapters), "--format", "peft", "--best"])
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(config.model_name), adapters)
    print(f"{sum(p.numel() for name, p in model.named_parameters() if 'lora_' in name)} numbers of adapters")


if __name__ == "__main__":
    main()
