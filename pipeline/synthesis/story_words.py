"""The words of the stories: names, wanted things, and the lists that the wordings draw from.

In: nothing. Out: constants. A wanted thing stands in `THINGS` and in no other list and no wording, so that the checker
can tell it from everything else in a story; a name has one pronoun, so that the checker can tell who "she" is. The
tests hold both. Written for this project.

It does not promise a natural frequency of words: a list is drawn from evenly.
"""


def words(block: str) -> tuple[str, ...]:
    """The words of a block."""
    return tuple(block.split())


HE_NAMES = words("""
    Ben Felix Hugo Jack Leo Oscar Sam Tom
    """)
SHE_NAMES = words("""
    Anna Clara Daisy Emma Lily Mia Nora Ruby
    """)
PRONOUN_OF = dict.fromkeys(HE_NAMES, "he") | dict.fromkeys(SHE_NAMES, "she")
# subject, object, possessive of each pronoun
CASES = {"he": {"he": "he", "him": "him", "his": "his"}, "she": {"he": "she", "him": "her", "his": "her"}}
PRONOUNS = {"he": "he", "him": "he", "his": "he", "himself": "he"} | dict.fromkeys(
    ("she", "her", "hers", "herself"), "she"
)
PLURAL_PRONOUNS = frozenset(("they", "them", "their", "both"))

KINDS = words("""ant badger bat bear beaver bee beetle camel cat crab cricket crow deer dog donkey dove duck eagle falcon ferret
    fox frog gecko goat goose hamster hare hedgehog heron horse kitten lamb lizard lynx magpie mole monkey moth mouse
    otter owl panda parrot pig pony puppy rabbit raccoon raven robin seal sheep snail sparrow squirrel stork swan tiger
    toad turtle weasel wolf wren yak zebra""")

# What a story can be about, by the kind of plot that can use it.
THINGS: dict[str, tuple[str, ...]] = {
    "treasure": words("""
        ball basket bell blanket button cap cloak crown doll hat kettle lamp mask mirror pillow puppet scarf shell
        umbrella vase wand
    """),
    "craft": words("""
        boat bridge cart chair fence hammock kite raft rocket sled table tent wagon
    """),
    "instrument": words("""
        banjo drum fiddle flute guitar harp piano trumpet violin
    """),
    "plant": words("""
        bean cabbage carrot cherry lemon melon pepper potato pumpkin rose tomato tulip turnip
    """),
    "prize": words("badge banner cup flag medal ribbon trophy"),
}
WANTED = frozenset(word for group in THINGS.values() for word in group)

TRAITS = words("""active anxious bold bouncy brave busy calm careful cheeky cheerful clever clumsy curious daring dreamy eager
    fearless forgetful friendly fussy gentle grumpy helpful honest hopeful hungry jolly kind lazy lively lonely merry
    messy mighty modest nimble nosy patient playful plump polite proud quick quiet restless scruffy serious shy silly
    sleepy stubborn sturdy talkative thoughtful timid tough witty young""")
COLOURS = words("""amber big blue bright brown carved copper crimson dotted dusty fancy flat fluffy glossy golden green grey heavy
    huge ivory light little long maroon neat new odd orange painted pale pink plain pretty purple red rosy round rusty
    scarlet shiny silver small smooth soft speckled spotted square striped tall thin tiny velvet wide yellow""")
# Feelings, by the mood that an event leaves behind.
FEELINGS: dict[str, tuple[str, ...]] = {
    "low": words("""angry ashamed bitter blue cross dizzy foolish gloomy glum helpless hopeless hurt miserable sad
        shaken sore sorry tired unhappy unlucky upset weary worried"""),
    "keen": words("""alert awake bright-eyed brisk certain confident determined eager excited fearless hopeful ready steady strong
        sure thrilled wide-awake"""),
    "glad": words("""blessed cheered comfortable content delighted glad grateful happy joyful lucky overjoyed peaceful pleased
        proud relieved satisfied thankful warm-hearted"""),
}

# Lists that a wording names in braces.
LISTS: dict[str, tuple[str, ...]] = {
    "animal": KINDS,
    "where": words("""abbey airfield arch bakery barn bay beach brewery brook burrow cabin canal canyon castle cave chapel cliff
        cottage creek dairy dam desert dock farm ferry field ford forest fort fountain garden gate glacier glen grove
        harbor heath hedge hill inn island jungle lake library lighthouse maze meadow mill mine moor museum orchard
        palace park pasture pier pond prairie quarry railway reef ridge river school shore spring stable station swamp
        temple tower tunnel valley village vineyard volcano waterfall well wharf workshop zoo"""),
    "near": (
        "near",
        "beside",
        "behind",
        "above",
        "below",
        "beyond",
        "close to",
        "not far from",
        "next to",
        "across from",
    ),
    "prep": (
        "under",
        "behind",
        "beside",
        "inside",
        "near",
        "next to",
        "close to",
        "in front of",
        "on top of",
        "beneath",
    ),
    "age": words("""ancient bare battered bent bulky chipped cold cracked creaky crooked damp dark dented dim dry empty faded
        filthy forgotten gloomy greasy hollow icy leaky lopsided mossy muddy narrow old open patched quaint ragged
        rickety rough rotten sandy shabby shady sloping sooty splintered squeaky steep sticky tangled tattered tilted
        torn twisted ugly warm weathered wet wobbly wooden worn"""),
    "fixture": words("""altar anvil attic awning balcony bale bank barrel bathtub beam bed bench boulder box bucket bush cabinet cage
        carpet cellar chest chimney coop counter crate cupboard curtain desk ditch door drain dresser fireplace gutter
        hearth hive hut kennel ledge log loft mailbox mat mattress nest pantry pigeonhole pile pit plank platform porch
        post puddle pump rock roof root rug sack shelf shutter sink sofa staircase statuette stove stump throne tree
        trough trunk tub vat wall wardrobe washstand window woodpile"""),
    "tool": words("""anchor axe bandage bolt bottle broom brush cable candle cane chain chalk chisel clamp cloth comb cord crayon
        crowbar dish drill feather fork funnel glove hammer hook hose jar jug knife ladder ladle lens lever magnet mallet
        map mop nail needle net notebook oar paddle pan peg pencil pin pole pot pulley rag rake rod rope ruler saw
        scale scoop screw shovel sickle sieve spade spoon stick string strap thread torch towel tray trowel tube wheel
        wire wrench"""),
    "food": words("""acorns almonds apples bacon bananas berries biscuits bread broth buns butter cakes candy cheese chestnuts
        chocolate cider cookies corn crackers cream dates dumplings eggs figs fudge garlic ginger grapes gravy hay honey
        jam jelly juice lentils milk mint muffins noodles nuts oats olives onions pancakes pasta pastries peanuts peas
        pickles pies plums pizza popcorn porridge pretzels pudding raisins rice rolls salad sausages seeds soup spinach
        stew sugar syrup tarts tea toast toffee waffles walnuts"""),
    "stuff": words("""bark boards bricks bamboo cardboard clay coal cotton dust fabric felt flour foam fur glass glue grass gravel
        hair ice ink lace lead leather leaves linen metal moss mud paint paper pebbles pine planks plaster reeds ribbons
        rubber salt sand sawdust silk slate snow soap soil steel stones straw tape tar thorns timber tin twigs varnish
        vines wax willow wool yarn"""),
    "make": words("""bent big blunt broad clean handy heavy iron large light little long metal modern new old plain rusty sharp
        short simple small solid sparkling spare stiff strong sturdy thick thin used wide wooden worn"""),
    "weather": words("""blustery breezy chilly clear cloudy cold cool crisp damp dark dull foggy freezing frosty hazy hot humid mild
        misty rainy snowy spring stormy summer sunny warm wet windy winter"""),
    "time": ("morning", "afternoon", "evening", "day", "night"),
    "clock": ("noon", "dawn", "dusk", "sunset", "sunrise", "midnight", "breakfast", "lunch", "supper", "bedtime"),
    "weekday": ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"),
    "went": words("""crawled crept dashed drifted hiked hobbled hopped hurried jogged marched plodded raced ran rushed scampered
        shuffled sneaked sped strolled tiptoed tramped trotted trudged walked wandered"""),
    "fine": words("""amazing beautiful charming dear delightful excellent grand handsome lovely magical marvelous nice perfect
        precious rare remarkable special splendid strange superb sweet useful wonderful"""),
    "number": ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "twenty"),
    "relative": words("""aunt brother butler captain coach cook cousin doctor elder farmer father gardener godmother grandfather
        grandmother guard judge king mayor miller mother neighbor nurse painter pilot pirate postman prince queen sailor
        shepherd sister tailor teacher twin uncle"""),
    "sound": words("""bang beep boom buzz chime chirp clang clank clap clatter click crackle crash creak crunch drip echo flutter
        gurgle hiss honk howl jingle knock murmur patter plop pop purr quack rattle roar rumble rustle scrape scratch
        screech shout shriek sizzle slam snap splash squawk squeak squeal squelch thud thump tick twang wail
        whir whisper whoosh"""),
    "smell": words("""ash basil cedar cinnamon clover cloves fish ferns fog hops iron lilac lilies mold oil oranges pepperoni petals
        pines rain resin rosemary saffron sage seaweed smoke thyme turpentine vanilla vinegar violets"""),
}

# What somebody does and how, by the mood of the moment.
DEEDS: dict[str, tuple[str, ...]] = {
    "low": words("""blushed cried fainted frowned groaned growled grumbled kneeled moaned mumbled pouted shivered shrugged sighed
        sniffed sobbed stumbled sulked trembled wept whimpered winced"""),
    "keen": words("""blinked bowed coughed gasped grinned grunted hummed listened muttered nodded paused rested shrugged sneezed
        stared stretched waited whistled winked yawned"""),
    "glad": words("""beamed blushed bowed cheered chuckled clapped danced giggled grinned jumped laughed nodded sang skipped smiled
        twirled waved winked"""),
}
MANNERS: dict[str, tuple[str, ...]] = {
    "low": words("""angrily anxiously awkwardly bitterly blindly crossly desperately gloomily grimly helplessly madly nervously
        painfully rudely sadly shyly sleepily solemnly sternly stiffly timidly wearily wildly"""),
    "keen": words("""aloud boldly bravely briefly briskly calmly carefully cautiously eagerly earnestly firmly gently hastily
        hurriedly keenly neatly nimbly patiently promptly quickly quietly rapidly silently slowly smoothly softly
        speedily steadily swiftly thoughtfully wisely"""),
    "glad": words("""brightly cheerfully dreamily fondly gladly gleefully gracefully gratefully happily heartily joyfully kindly
        loudly lovingly merrily politely proudly sweetly tenderly warmly"""),
}
