"""The chat template as Jinja, for the programs that run our models: transformers, llama.cpp, vLLM.

`chat.render` is what we train on; this text must give the same string, and a test holds both equal in transformers, ids
and assistant masks. `{% generation %}` marks what is trained (transformers' `return_assistant_tokens_mask`).

Not promised: canonical arguments (a call whose `arguments` are JSON text goes through as it is, `chat.render` writes it
anew with ", " and ": "), and results sorted into call order (`chat.render` sorts them).
"""

TEMPLATE = """\
{%- set ns = namespace(first=0) -%}
{%- set opens = messages and messages[0].role in ['system', 'developer'] -%}
{%- if opens or tools -%}
    {{- '<|im_start|>system\\n' -}}
    {%- if opens -%}
        {%- set ns.first = 1 -%}
        {{- messages[0].content or '' -}}
        {{- '\\n\\n' if tools and messages[0].content else '' -}}
    {%- endif -%}
    {%- if tools -%}
        {{- 'Tools you can call:\\n<tools>\\n' -}}
        {%- for tool in tools -%}
            {{- (tool.function if tool.function is defined else tool) | tojson }}{{ '\\n' -}}
        {%- endfor -%}
        {{- '</tools>' -}}
    {%- endif -%}
    {{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages[ns.first:] -%}
    {%- if message.role == 'assistant' -%}
        {{- '<|im_start|>assistant\\n' -}}
        {%- generation -%}
        {%- set text = (message.content or '') | trim -%}
        {{- text -}}
        {%- for call in message.tool_calls or [] -%}
            {%- set function = call.function if call.function is defined else call -%}
            {{- '\\n' if text or not loop.first else '' -}}
            {{- '<tool_call>\\n{"name": ' -}}{{- function.name | tojson -}}{{- ', "arguments": ' -}}
            {{- function.arguments if function.arguments is string else function.arguments | tojson -}}
            {{- '}\\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>' -}}
        {%- endgeneration -%}
        {{- '\\n' -}}
    {%- elif message.role == 'tool' -%}
        {{- '<|im_start|>tool\\n<tool_response>\\n' -}}{{- message.content or '' -}}
        {{- '\\n</tool_response><|im_end|>\\n' -}}
    {%- else -%}
        {{- '<|im_start|>' -}}{{- 'system' if message.role == 'developer' else message.role -}}{{- '\\n' -}}
        {{- message.content or '' -}}{{- '<|im_end|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
