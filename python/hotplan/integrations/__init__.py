"""Where other programs find hotplan: SGLang's plugin, vLLM's operators, ``torch.ops``. Nothing imports these but them.

:mod:`hotplan.integrations.sglang` is loaded by SGLang itself, :mod:`hotplan.integrations.vllm` by who calls its
``install``, :mod:`hotplan.integrations.torch_library` while ``torch.compile`` traces a call.
"""
