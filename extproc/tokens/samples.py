"""Texts on which a fast tokenizer must agree with the reference before it is trusted.

Short and varied: what pre-tokenizers and merge tables treat differently (case, contractions, digit groups,
white space runs, scripts, combining marks, emoji sequences, control characters, text that looks like control
tokens). Written for this purpose.
"""

from __future__ import annotations

_SEEDS = (
    "",
    " ",
    "a",
    "Hello, world!",
    "It's we're I'LL they'd CAN'T o'clock ''quoted''",
    "  leading and trailing  ",
    "tabs\tand\t\ttabs\n\n\n   \n\t\nnewlines\r\nand returns\r\r\n",
    "camelCase PascalCase snake_case SCREAMING_SNAKE kebab-case dot.path.name::ns->field",
    'def add(a: int, b: int = 2) -> int:\n    """Sum."""\n    return a + b  # done\n',
    'for (let i = 0; i < n; i++) {\n\tconsole.log(`${i}: ${xs[i] ?? "none"}`);\n}\n',
    "SELECT * FROM t WHERE a >= 1e-9 AND b <> 'x''y' ORDER BY 1;",
    '{"k":[1,2.50,-3e+7,null,true],"s":"a\\"b\\\\c\\u00e9"}',
    "0 1 12 123 1234 12345 123456 1234567 3.14159 1,000,000 0x1F 007 １２３",
    "deadbeef 0123456789abcdef f00d:cafe::1 550e8400-e29b-41d4-a716-446655440000",
    "QmFzZTY0IGlzIGRlbnNlIGJ1dCBub3QgY29kZQ==",
    "https://example.test/a/b?c=d&e=%20f#g user@example.test",
    "naïve café résumé coöperate Ångström ﬁne ﬂow",
    "e\u0301 a\u0308 n\u0303 \u1e9b\u0323 \u0958 \U0001d160",
    "Zażółć gęślą jaźń — „cytat” … ‚innen‘ «guillemets»",
    "Быстрая лиса, ёлка и объём; съешь ещё",
    "Ελληνικά ΐ Ύ ς σ",
    "مرحبا بالعالم ﷺ لا إله",
    "שלום עולם וְאָהַבְתָּ",
    "नमस्ते दुनिया क्षत्रिय",
    "สวัสดีชาวโลก",
    "请分析第三季度营收趋势，并给出建议。",
    "漢字かな交じり文とカタカナ、全角ＡＢＣ１２３。",
    "안녕하세요 세계 ㄱㄴㄷ 각",
    "Xin chào thế giới, đường phố",
    "😀😃 👩‍👩‍👧‍👦 👍🏽 🇩🇪🇯🇵 ❤️ ☕️ 1️⃣",
    "∀x∈ℝ: ⌈x⌉ ≥ x, ∑ᵢ aᵢ² ≠ √2·π ± ½",
    "\u200b\u200d\ufeff\u00a0\u2003\u2028\u2029\u3000",
    "\x00\x01\x02\x1b[31m\x7f\x85",
    "\ufffd \ufffe \U0010ffff \ue000",
    "################################ ================ ---------------- ________",
    "!!!???...,,,;;;:::((([[[{{{<<<>>>}}}]]])))@#$%^&*~`|\\/",
    " " * 3 + "x" + " " * 17 + "y" + " " * 128 + "z\n" + "\n" * 9 + "\t" * 5,
    "a" * 300,
    "ab" * 150 + "\n" + "9" * 130,
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|></s><s>[INST] x [/INST]<start_of_turn>",
    '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call><think>\n\n</think>',
    "diff --git a/x b/x\n@@ -1,3 +1,4 @@\n-old line\n+new line\n context\n",
    "Line one\nLine two\nthree\nFour 4\nfive",
)

#: The seeds alone, and pairs of them run together, so that borders between kinds of text are covered too.
SAMPLES: tuple[str, ...] = (
    *_SEEDS,
    *(first + second for first, second in zip(_SEEDS, _SEEDS[7:] + _SEEDS[:7], strict=True)),
    *(first + second for first, second in zip(_SEEDS, _SEEDS[19:] + _SEEDS[:19], strict=True)),
)
