lockstep train --experiment-name tuned --model-name model --model.pretrained --dataset-name chats --seed $SEED \
    --lr 1e-3 --micro-batch-size 8 --optim.schedule linear --optim.warmup-steps 0 --optim.floor 0
lockstep export outputs/tuned tuned --format hf
