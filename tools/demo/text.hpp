// The text that the demo routes unless the user names a file: the installed command has no checkout around it.
#pragma once

namespace deep_ep::tools {

inline constexpr const char* kDemoText = R"(A language model with a mixture of experts does not send every word through
every weight. In each layer a small gate looks at the word and chooses a few of many experts: eight of two hundred and
fifty-six, say. The experts are too many for one device, so each device holds a share of them, and the words have to
travel. Dispatch carries a word from the device that has it to the devices that own its experts; it goes to each of them
once, however many of its experts live there. The experts compute. Combine brings their results home, where they are added
up with the weights that the gate gave them, and the next layer begins.

The same word does not always take the same way. The word before it matters, too: a river bank and a savings bank may meet
different experts. Some experts are popular and get several times the average load, others wait. Nobody knows in advance
how many words will come, so the devices first tell each other how many rows they are going to send; then everyone knows
where in the others' memory its rows belong, and writes them there, without a copy in between.

This text makes that trip. Every word and every mark of it is a token; its row of numbers is made from the word, and the
experts that it meets are made from fixed seeds, so that each run takes the same ways. All that arrives is compared with a plain
program that computes the same layer without any communication.)";

}  // namespace deep_ep::tools
