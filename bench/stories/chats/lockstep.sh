lockstep train --experiment-name tuned --model-name model --model.pretrained --dataset-name chats --seed $SEED
lockstep export outputs/tuned tuned --format hf
