"""TRL's SFTTrainer trains an adapter of PEFT, with foretrain's callback, on a tiny model and text made here."""

import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from foretrain.integrations.transformers import HybridCallback

words = ["<end>", "plus", "is", *map(str, range(40))]
plain = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token=words[0]))
plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token=words[0], pad_token=words[0])
data = Dataset.from_list([{"text": f"{a} plus {b} is {a + b}"} for a in range(20) for b in range(20)]).shuffle(seed=0)

torch.manual_seed(0)
shape = GPT2Config(vocab_size=len(words), n_positions=8, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
trainer = SFTTrainer(
    GPT2LMHeadModel(shape),
    args=SFTConfig(
        tempfile.mkdtemp(), max_steps=200, learning_rate=1e-3, lr_scheduler_type="constant", report_to=[], use_cpu=True
    ),
    train_dataset=data.select(range(64, 400)),
    eval_dataset=data.select(range(64)),
    processing_class=tokenizer,
    peft_config=LoraConfig(r=4, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True, task_type="CAUSAL_LM"),
)
callback = HybridCallback(probe=64).bind(trainer)
trainer.train()
print(callback.run.summary()["audit"]["sentence"])
