lockstep train --experiment-name tuned --model-name model --model.pretrained --dataset-name notes \
    --lora.rank 8 --batch-size 8 --seq-len 16
lockstep export outputs/tuned adapters --format peft
