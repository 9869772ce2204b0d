lockstep train --task classification --experiment-name reviews --model-name model --dataset-name reviews \
    --batch-size 16 --seq-len 64 --eval-freq 1epoch --best-metric accuracy:max
