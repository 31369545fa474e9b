"""The small world behind a story: its state, how a wording is read in that state, and the words of all wordings.

A wording is a line with slots in braces. `realize` fills them from left to right and tracks who was named last, so that
a pronoun always agrees with the last name before it; `stories.check` requires this rule of any text.

    {P} {P:him} {P:his}     the protagonist: a pronoun if named last (with the name again now and then), else the name
    {P:name}                always the name;  {F...} the friend, {H...} who has the wanted thing at the end
    {P.kind} {P.trait} {P.feeling}   read from the entity;  {place} where the protagonist is;  {new place} moves
    {obj} {a obj} {noun} {full}      "the kite" or "the red kite"; "a red kite"; "kite" or "red kite"; "red kite"
    {aim}                   the plot's goal as an infinitive, "find the kite"
    {why}                   a clause with a cause that is true in this state
    {spot} {gear} {mishap}  phrases of several words
    {list} {a list} {same list}      a word of `LISTS` that this story has not used yet; the last one again

A wanted thing is in `THINGS` and in no other list or wording, so that the checker can distinguish it from everything
else in a story; a name has one pronoun, so that the checker can resolve "she". The tests check both. The words were
collected for this project; all words of a list are equally likely.

`COMMON` has common English words for names and values that no list of the toolbox contains. What a model must copy has
to be drawn from far more words than a toolbox has: a token that is never an answer in training is never an answer
afterwards (docs/LOG.md). It has everyday words, and the thousand that occur in the most docstrings of Python's standard
library, without the words in names and parameters of the held-out tools.

Not promised: English beyond the given wordings, which are in the past tense and so need no agreement; a natural
frequency of words; that a word of `COMMON` fits its context, or that descriptions and values of the held-out tools
share none of them.
"""

import random
import re
from dataclasses import dataclass, field
from functools import cache

from pipeline.synthetic.tool_values import word_list

NAME_AGAIN = 0.85  # share of sentences with the name where a pronoun would do: a small model needs frequent names
NOUN_ALONE = 0.88  # share of "the kite" rather than "the red kite"

SPOTS = ("{prep} the {fixture}", "{prep} {a fixture}", "{prep} the {age} {fixture}")
GEAR = ("{a tool}", "{a make} {tool}", "some {stuff}")
MISHAPS = (
    "the wind took the {stuff}",
    "{P} slipped on some {stuff}",
    "{a animal} ran off with the {tool}",
    "the {tool} broke with {a sound}",
    "the {fixture} fell over with {a sound}",
    "{a sound} from the {where} made {P:him} jump",
    "{a animal} ate the {food}",
    "rain fell on the {stuff}",
    "{P} got lost at the {where}",
    "the {relative} locked the {fixture}",
    "there was no {stuff} left",
    "{P} hit the {fixture} and hurt one {knee}",
)
WHYS = ("because {P} felt {P.feeling}", "because {P} was so {P.trait}", "because {obj} was so {fine}")
WHYS_WITH_FRIEND = ("because {F} was so {F.trait}",)
KNEES = word_list("ankle arm back chin ear elbow foot knee leg nose paw shoulder tail toe")
PIECES = word_list("bits of,boxes of,buckets of,bundles of,handfuls of,heaps of,lumps of,pieces of,rolls of", ",")
PHRASES = SPOTS + GEAR + MISHAPS + WHYS + WHYS_WITH_FRIEND + KNEES + PIECES

_SENTENCE_START = re.compile(r'(?:^"?|(?<=[.!?] )"?)[a-z]')


@dataclass(slots=True)
class Entity:
    """A character of a story. The pronoun follows from the name."""

    name: str
    kind: str
    trait: str
    feeling: str
    pronoun: str = ""

    def __post_init__(self) -> None:
        self.pronoun = PRONOUN_OF[self.name]


@dataclass(slots=True)
class World:
    """The state of one story; events change it, wordings read it."""

    rng: random.Random
    hero: Entity
    friend: Entity
    noun: str  # the wanted thing
    colour: str
    place: str  # where the protagonist is
    aims: tuple[str, ...]
    facts: set[str] = field(default_factory=set)
    holder: str = "P"  # who has the wanted thing at the end: "P" or "F"
    last: Entity | None = None  # whom a pronoun would refer to
    since_name: int = 0  # sentences since the last name
    mood: str = "keen"
    mentioned: bool = False  # the entity named last occurs in this sentence already
    used: set[str] = field(default_factory=set)
    recent: dict[str, str] = field(default_factory=dict)  # name of a list -> the word drawn last


def new_world(rng: random.Random, things: tuple[str, ...], aims: tuple[str, ...]) -> World:
    """Draw a protagonist, a friend of another name and kind, a thing and a place."""

    def draw_entity(kind: str, trait: str) -> Entity:
        names = HE_NAMES if rng.random() < 0.5 else SHE_NAMES
        return Entity(name=rng.choice(names), kind=kind, trait=trait, feeling=rng.choice(FEELINGS["keen"]))

    kinds, traits = rng.sample(KINDS, 2), rng.sample(TRAITS, 2)
    hero, friend = draw_entity(kinds[0], traits[0]), draw_entity(kinds[1], traits[1])
    while friend.name == hero.name:
        friend = draw_entity(kinds[1], traits[1])
    world = World(
        rng=rng,
        hero=hero,
        friend=friend,
        noun=rng.choice(things),
        colour=rng.choice(COLOURS),
        place=rng.choice(LISTS["where"]),
        aims=aims,
    )
    world.used.update(kinds, (world.place, world.colour))
    return world


def realize(world: World, wording: str) -> str:
    """Fill a wording from the current state: one or more sentences. Updates who was named last and the used words."""
    world.mentioned = False
    world.since_name += 1
    text = _fill(world, wording)
    return _SENTENCE_START.sub(lambda match: match[0].upper(), text)


@cache
def _compile(wording: str) -> tuple[tuple[str, str], ...]:
    """Split a wording into (fixed text, slot) pairs; the last slot is empty."""
    parts = re.split(r"\{([^}]*)\}", wording)
    return tuple(zip(parts[::2], [*parts[1::2], ""], strict=True))


def _fill(world: World, wording: str) -> str:
    parts: list[str] = []
    for fixed, slot in _compile(wording):
        parts.append(fixed)
        if slot:
            has_article = slot.startswith("a ")
            word = _fill_slot(world, slot[2:] if has_article else slot)
            parts.append(_article(word) + word if has_article else word)
    return "".join(parts)


def _article(word: str) -> str:
    return "an " if word.startswith(("a", "e", "i", "o", "honest", "ugly", "un")) else "a "


def _fill_slot(world: World, slot: str) -> str:
    rng = world.rng
    if slot[0] in "PFH":
        return _person(world, slot)
    if slot in LISTS or slot in ("did", "manner"):
        return _draw_word(world, slot)
    match slot:
        case "obj" | "noun":
            noun = world.noun if rng.random() < NOUN_ALONE else f"{world.colour} {world.noun}"
            return f"the {noun}" if slot == "obj" else noun
        case "full":
            return f"{world.colour} {world.noun}"
        case "colour":
            return world.colour
        case "place":
            return world.place
        case "new place":
            world.place = _draw_word(world, "where")
            return world.place
        case "aim":
            return _fill(world, rng.choice(world.aims))
        case "spot":
            return _fill(world, rng.choice(SPOTS))
        case "gear":
            return _fill(world, rng.choice(GEAR))
        case "mishap":
            return _fill(world, rng.choice(MISHAPS))
        case "why":
            choices = WHYS + WHYS_WITH_FRIEND if "friend" in world.facts else WHYS
            return _fill(world, rng.choice(choices))
        case "knee":
            return rng.choice(KNEES)
        case "stuff:pieces":
            return f"{rng.choice(PIECES)} {_draw_word(world, 'stuff')}"
    assert slot.startswith("same "), f"unknown slot {slot!r}"
    return world.recent[slot[5:]]


def _draw_word(world: World, list_name: str) -> str:
    by_mood = DEEDS if list_name == "did" else MANNERS
    choices = LISTS[list_name] if list_name in LISTS else by_mood[world.mood]
    word = world.rng.choice(choices)
    for _ in range(8):
        if word not in world.used:
            break
        word = world.rng.choice(choices)
    world.used.add(word)
    world.recent[list_name] = word
    return word


def _person(world: World, slot: str) -> str:
    """A name or a pronoun, depending on entity was named last; or an attribute of the entity."""
    entity = {"P": world.hero, "F": world.friend, "H": world.hero if world.holder == "P" else world.friend}[slot[0]]
    suffix = slot[1:]
    if suffix.startswith("."):
        return getattr(entity, suffix[1:])
    case = suffix[1:] or "he"
    repeat_name = not world.mentioned and (world.since_name > 2 or world.rng.random() < NAME_AGAIN)
    world.mentioned = True
    if case == "name" or world.last is not entity or repeat_name:
        world.last, world.since_name = entity, 0
        return f"{entity.name}'s" if case == "his" else entity.name
    return CASES[entity.pronoun][case]


# -- words of the stories ----------------------------------------------------------------------------------------------

HE_NAMES = word_list("Ben Felix Hugo Jack Leo Oscar Sam Tom")
SHE_NAMES = word_list("Anna Clara Daisy Emma Lily Mia Nora Ruby")
PRONOUN_OF = dict.fromkeys(HE_NAMES, "he") | dict.fromkeys(SHE_NAMES, "she")
# subject, object, possessive of each pronoun
CASES = {"he": {"he": "he", "him": "him", "his": "his"}, "she": {"he": "she", "him": "her", "his": "her"}}
PRONOUNS = {"he": "he", "him": "he", "his": "he", "himself": "he"} | dict.fromkeys(
    ("she", "her", "hers", "herself"), "she"
)
PLURAL_PRONOUNS = frozenset(("they", "them", "their", "both"))

KINDS = word_list(
    """ant badger bat bear beaver bee beetle camel cat crab cricket crow deer dog donkey dove duck eagle falcon
    ferret fox frog gecko goat goose hamster hare hedgehog heron horse kitten lamb lizard lynx magpie mole monkey
    moth mouse otter owl panda parrot pig pony puppy rabbit raccoon raven robin seal sheep snail sparrow squirrel
    stork swan tiger toad turtle weasel wolf wren yak zebra"""
)

# What a story can be about, by the kind of plot that can use it.
THINGS: dict[str, tuple[str, ...]] = {
    "treasure": word_list(
        """ball basket bell blanket button cap cloak crown doll hat kettle lamp mask mirror pillow puppet scarf
        shell umbrella vase wand"""
    ),
    "craft": word_list("boat bridge cart chair fence hammock kite raft rocket sled table tent wagon"),
    "instrument": word_list("banjo drum fiddle flute guitar harp piano trumpet violin"),
    "plant": word_list("bean cabbage carrot cherry lemon melon pepper potato pumpkin rose tomato tulip turnip"),
    "prize": word_list("badge banner cup flag medal ribbon trophy"),
}
WANTED = frozenset(word for group in THINGS.values() for word in group)

TRAITS = word_list(
    """active anxious bold bouncy brave busy calm careful cheeky cheerful clever clumsy curious daring dreamy eager
    fearless forgetful friendly fussy gentle grumpy helpful honest hopeful hungry jolly kind lazy lively lonely
    merry messy mighty modest nimble nosy patient playful plump polite proud quick quiet restless scruffy serious
    shy silly sleepy stubborn sturdy talkative thoughtful timid tough witty young"""
)
COLOURS = word_list(
    """amber big blue bright brown carved copper crimson dotted dusty fancy flat fluffy glossy golden green grey
    heavy huge ivory light little long maroon neat new odd orange painted pale pink plain pretty purple red rosy
    round rusty scarlet shiny silver small smooth soft speckled spotted square striped tall thin tiny velvet wide
    yellow"""
)
# Feelings, by the mood that an event leaves behind.
FEELINGS: dict[str, tuple[str, ...]] = {
    "low": word_list(
        """angry ashamed bitter blue cross dizzy foolish gloomy glum helpless hopeless hurt miserable sad shaken
        sore sorry tired unhappy unlucky upset weary worried"""
    ),
    "keen": word_list(
        """alert awake bright-eyed brisk certain confident determined eager excited fearless hopeful ready steady
        strong sure thrilled wide-awake"""
    ),
    "glad": word_list(
        """blessed cheered comfortable content delighted glad grateful happy joyful lucky overjoyed peaceful pleased
        proud relieved satisfied thankful warm-hearted"""
    ),
}

# Lists that a wording names in braces.
LISTS: dict[str, tuple[str, ...]] = {
    "animal": KINDS,
    "where": word_list(
        """abbey airfield arch bakery barn bay beach brewery brook burrow cabin canal canyon castle cave chapel
        cliff cottage creek dairy dam desert dock farm ferry field ford forest fort fountain garden gate glacier
        glen grove harbor heath hedge hill inn island jungle lake library lighthouse maze meadow mill mine moor
        museum orchard palace park pasture pier pond prairie quarry railway reef ridge river school shore spring
        stable station swamp temple tower tunnel valley village vineyard volcano waterfall well wharf workshop zoo"""
    ),
    "near": word_list("near,beside,behind,above,below,beyond,close to,not far from,next to,across from", ","),
    "prep": word_list("under,behind,beside,inside,near,next to,close to,in front of,on top of,beneath", ","),
    "age": word_list(
        """ancient bare battered bent bulky chipped cold cracked creaky crooked damp dark dented dim dry empty faded
        filthy forgotten gloomy greasy hollow icy leaky lopsided mossy muddy narrow old open patched quaint ragged
        rickety rough rotten sandy shabby shady sloping sooty splintered squeaky steep sticky tangled tattered
        tilted torn twisted ugly warm weathered wet wobbly wooden worn"""
    ),
    "fixture": word_list(
        """altar anvil attic awning balcony bale bank barrel bathtub beam bed bench boulder box bucket bush cabinet
        cage carpet cellar chest chimney coop counter crate cupboard curtain desk ditch door drain dresser fireplace
        gutter hearth hive hut kennel ledge log loft mailbox mat mattress nest pantry pigeonhole pile pit plank
        platform porch post puddle pump rock roof root rug sack shelf shutter sink sofa staircase statuette stove
        stump throne tree trough trunk tub vat wall wardrobe washstand window woodpile"""
    ),
    "tool": word_list(
        """anchor axe bandage bolt bottle broom brush cable candle cane chain chalk chisel clamp cloth comb cord
        crayon crowbar dish drill feather fork funnel glove hammer hook hose jar jug knife ladder ladle lens lever
        magnet mallet map mop nail needle net notebook oar paddle pan peg pencil pin pole pot pulley rag rake rod
        rope ruler saw scale scoop screw shovel sickle sieve spade spoon stick string strap thread torch towel tray
        trowel tube wheel wire wrench"""
    ),
    "food": word_list(
        """acorns almonds apples bacon bananas berries biscuits bread broth buns butter cakes candy cheese chestnuts
        chocolate cider cookies corn crackers cream dates dumplings eggs figs fudge garlic ginger grapes gravy hay
        honey jam jelly juice lentils milk mint muffins noodles nuts oats olives onions pancakes pasta pastries
        peanuts peas pickles pies plums pizza popcorn porridge pretzels pudding raisins rice rolls salad sausages
        seeds soup spinach stew sugar syrup tarts tea toast toffee waffles walnuts"""
    ),
    "stuff": word_list(
        """bark boards bricks bamboo cardboard clay coal cotton dust fabric felt flour foam fur glass glue grass
        gravel hair ice ink lace lead leather leaves linen metal moss mud paint paper pebbles pine planks plaster
        reeds ribbons rubber salt sand sawdust silk slate snow soap soil steel stones straw tape tar thorns timber
        tin twigs varnish vines wax willow wool yarn"""
    ),
    "make": word_list(
        """bent big blunt broad clean handy heavy iron large light little long metal modern new old plain rusty
        sharp short simple small solid sparkling spare stiff strong sturdy thick thin used wide wooden worn"""
    ),
    "weather": word_list(
        """blustery breezy chilly clear cloudy cold cool crisp damp dark dull foggy freezing frosty hazy hot humid
        mild misty rainy snowy spring stormy summer sunny warm wet windy winter"""
    ),
    "time": ("morning", "afternoon", "evening", "day", "night"),
    "clock": ("noon", "dawn", "dusk", "sunset", "sunrise", "midnight", "breakfast", "lunch", "supper", "bedtime"),
    "weekday": ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"),
    "went": word_list(
        """crawled crept dashed drifted hiked hobbled hopped hurried jogged marched plodded raced ran rushed
        scampered shuffled sneaked sped strolled tiptoed tramped trotted trudged walked wandered"""
    ),
    "fine": word_list(
        """amazing beautiful charming dear delightful excellent grand handsome lovely magical marvelous nice perfect
        precious rare remarkable special splendid strange superb sweet useful wonderful"""
    ),
    "number": ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "twenty"),
    "relative": word_list(
        """aunt brother butler captain coach cook cousin doctor elder farmer father gardener godmother grandfather
        grandmother guard judge king mayor miller mother neighbor nurse painter pilot pirate postman prince queen
        sailor shepherd sister tailor teacher twin uncle"""
    ),
    "sound": word_list(
        """bang beep boom buzz chime chirp clang clank clap clatter click crackle crash creak crunch drip echo
        flutter gurgle hiss honk howl jingle knock murmur patter plop pop purr quack rattle roar rumble rustle
        scrape scratch screech shout shriek sizzle slam snap splash squawk squeak squeal squelch thud thump tick
        twang wail whir whisper whoosh"""
    ),
    "smell": word_list(
        """ash basil cedar cinnamon clover cloves fish ferns fog hops iron lilac lilies mold oil oranges pepperoni
        petals pines rain resin rosemary saffron sage seaweed smoke thyme turpentine vanilla vinegar violets"""
    ),
}

# What somebody does and how, by the mood of the moment.
DEEDS: dict[str, tuple[str, ...]] = {
    "low": word_list(
        """blushed cried fainted frowned groaned growled grumbled kneeled moaned mumbled pouted shivered shrugged
        sighed sniffed sobbed stumbled sulked trembled wept whimpered winced"""
    ),
    "keen": word_list(
        """blinked bowed coughed gasped grinned grunted hummed listened muttered nodded paused rested shrugged
        sneezed stared stretched waited whistled winked yawned"""
    ),
    "glad": word_list(
        """beamed blushed bowed cheered chuckled clapped danced giggled grinned jumped laughed nodded sang skipped
        smiled twirled waved winked"""
    ),
}
MANNERS: dict[str, tuple[str, ...]] = {
    "low": word_list(
        """angrily anxiously awkwardly bitterly blindly crossly desperately gloomily grimly helplessly madly
        nervously painfully rudely sadly shyly sleepily solemnly sternly stiffly timidly wearily wildly"""
    ),
    "keen": word_list(
        """aloud boldly bravely briefly briskly calmly carefully cautiously eagerly earnestly firmly gently hastily
        hurriedly keenly neatly nimbly patiently promptly quickly quietly rapidly silently slowly smoothly softly
        speedily steadily swiftly thoughtfully wisely"""
    ),
    "glad": word_list(
        """brightly cheerfully dreamily fondly gladly gleefully gracefully gratefully happily heartily joyfully
        kindly loudly lovingly merrily politely proudly sweetly tenderly warmly"""
    ),
}


# -- common words ------------------------------------------------------------------------------------------------------

COMMON = word_list("""
    able about above absolute absorb abstract accept accepted accepts access accessed according acorn across action
    active actor acts actual actually added adding addition addresses adds adjust admire admit advice advise afford
    after again against agency agree airport album algorithm alley allow allowed allowing allows almond already also
    always amuse ankle announce another answer anything apologise appear appears append appended applaud applied
    applies apply apron arbitrary arcade arena args argue argument arguments armchair around array arrest arrive
    arrow artist ascii assigned assume assumed assumes async asyncio athlete atlas attack attempt attempts attend
    attic attribute autumn available avenue avoid award away back backward backwards bacon badge bake bakery balcony
    ballet bamboo banana bandage banjo banner barber bargain barley barn base based basic basin bathe bathtub
    battery beach beacon beard beaver because become becomes bedroom been beetle before beg beginning begins behave
    behavior being belfry below best between bicycle binary bind binding bindings birch biscuit bishop bits blank
    blender bless block blocking blocks blossom boast boil bonnet bookshelf bool boolean borrow both bottom boulder
    bounce bound bouquet bowl bracelet branch brass bread breathe breeze brick broccoli broken broom brother brush
    bucket buffer buffered buffers buffet bugle build built builtin bunny bureau bury butcher butter button buttons
    buzz byte bytes cabbage cabin cache cactus calendar call callable callback callbacks called caller calling calls
    canal canary cancel candy cannot canoe canonical canvas canyon captain caravan care carpenter carpet carrot
    cartoon carve case cases cashier cathedral cattle caught cause cavern celery cellar cement century ceramic
    cereal certain chalk challenge change changed changes chapel character charity chars charset charter chase check
    checked checking checks cheese chemist cherry chess chew child children chimney chocolate choir chop cinema
    circus citizen clap clarinet class classes classroom clear clergy client cliff climate climb clinic cloak close
    closed closing clover coach coast cobbler coconut code codec coffee college colony color column comb come comet
    command commands comment comments common commonly compare compared comparing compete compile compiled compiler
    complain complete completed component comrade concentrate concert condition confess config confuse connect
    connected consider consists constants contain contained container contains content contents context continue
    control controls converted cookie copied copper copy coral core coroutine correct corridor cottage cotton couch
    cough could count cousin coward cradle crane crash crater crawl crayon create created creates creating creation
    cricket crocodile cross crown crumb crush cry crystal cupboard cure curl current currently curtain cushion
    custom customer cycle daisy damage dancer dare data database daughter deal debug debugging decay deceive decimal
    decode decoded decoding decorate decorator default defaults define defined defines defining delay delete deleted
    delight dentist depend dependent depending depends depth deputy derived describe described deserve desired desk
    destroy details detected detective determine device dialog diamond diary dict dicts different digits dinosaur
    diploma direct direction directly directory disabled disagree discarded discover disk dislike display displayed
    distutils divide docstring doctor document does doing dolphin done donkey doorbell dotted double doubt doughnut
    down drag drawer dream drip driver drizzle drown drum duchess during dust dwarf dynasty each earn earring easel
    eclipse editor educate effect either elbow element elements elephant elevator else embarrass embassy embedded
    emerald emergency empire employ empty enable enabled encode encoded encoding encourage ending ends energy enjoy
    enough ensure entered entertain entire entries entry envelope equal equator error errors escape escaped escapes
    even evening event events every exact exactly examine example examples except exception excite excuse execute
    executed executing execution exercise exist existing exists exit expanded expected explain explicit explode
    extended extension extra fabric factory fail fails failure fairy falcon false family fancy farmer fashion fast
    fasten faster father faucet fear features festival fetch fiddle field fields file filename filenames files
    filter final finger fireplace first fisher fixed flag flags flame flannel flap flavour float flock flood florist
    flour flower flute fog fold follow followed following follows font forehead forgive fork form format formats
    formatted fortune fossil found fountain four fowl fragrance frame frames framework free freezer fridge frog
    front fruit fry full fully func function functions furnace furniture further future galaxy garage garlic garment
    gather gaze gazelle gencodec general generally generate generated generator generic gets ghost ginger giraffe
    give given gives giving glass global glove glow glue goat goblet goes goldfish good goose gorilla grab grandma
    granite grape grass gravel gravity greater greet grin grip groan grocery group groups guard guess guide
    guidebook gulf gymnasium hairbrush hallway hamlet hammer hamster handle handled handler handles handling hang
    happen happens hard harm harvest hash hatchet hate haunt have having hawk hazel header headers headlight heal
    heart heat hedge helmet help helper herb here heron high higher highway hill hinge hobby hockey hold home honey
    hood hook hop horizon horn horse hospital host hostel hostname household hover however http https hug hum human
    hunt hurricane hurry hut hyena iceberg icing identical idlelib idol igloo ignore ignored imagine implement
    import important imported importing importlib impress improve include included includes including increase
    indent indented index indicate indicated indicates infant info inform inherited initial inject injure inn input
    insert inserted inside install installed instance instances instead instrument integer integers intend intended
    interface internal interrupt into introduce invalid invent invite invoked iron irritate issues itch item items
    iterable iteration iterator itself ivory ivy jaguar jam janitor jasmine jaw jelly jewel jockey jog joke judge
    jug juggle juice jury just kangaroo kayak keep kennel keys keyword keywords kick kingdom kiosk kitchen kite knee
    kneel knife knight knob knock knot know known kwargs label laboratory lace lagoon lamb language large larger
    last later latter laugh launch laundry lawn lawyer leading learn least leather leave lecture left legacy legend
    lemburg lemon lemonade length leopard less lettuce level library licence lick lie lighten lighthouse like likely
    lily lime limit line linen lineno lines link lion list listed listing lists literal lizard load loaded loader
    lobby lobster local location locker lodge logging lollipop long longer look looking looks lookup loop lower
    luggage lumber lunch lungs machine made magazine magician maiden mailbox main make makes making mammal manager
    mango mansion many maple mapping mappings maps marble marina mark market marsh mask match matched matches
    matching mattress maximum mayor meal meaning means mechanism medal medicine melody melon member members memory
    menu merchant mercy mermaid messages meteor method methods midnight might milk mineral minimal minimum minus
    miracle missing mist mitten mixture moccasin mode modified modify module modules monastery monk monkey monument
    more morning mosaic mosquito most motor mountain mourn mouse moustache mouth move moved movie much mud muffin
    mule multi multiple multiply murder museum mushroom musician must mustard nail name named names namespace napkin
    nation necessary need needed needs negative neighbour neither nephew nest nested network never newline newlines
    newly newspaper next night nod node none noodle normal normally note nothing null numb numbers numeric nurse
    oasis oatmeal oats obey object objects observe obtain obtained occur occurred occurs ocean offend offset often
    olive omitted once ones onion only open opened opening opera operation option optional options orchard orchestra
    order ordered organ original ornament ostrich other others otherwise otter output outside oven over override
    overrides owe owl oxygen package packages paddle page pair pairs pajamas palm pancake panda panther parachute
    parade param parameter parent parrot parse parsed parser parsing parsley part parts pass passed passenger
    passing password pasta paste pastry path pathname paths patient pattern patterns pause pavement peach peacock
    peanut pear pearl pebble pedal peel peep pelican penguin perform performed perfume permit persuade photo physics
    piano pickle picnic pigeon pillow pilot pinch pineapple pipe pirate pistachio place places plain plank plaster
    plate platform platforms please plug plum plumber plus pocket poet point pointer points poke policy polish pond
    pony poppy porch porridge port portion portrait position positive possible possibly potato pottery poultry pour
    powder practise prairie praise pray preach precede prefer prefix prepare present pretend pretty prevent previous
    prick priest prince princess print printable printed printing prints priority prison private prize probably
    problem process processed processes produce produced produces professor program promise prompt proper properly
    property prophet protect protocol provide provided provides providing proxy public pudding puddle pumpkin punch
    punish puppet puppy purchase purpose purposes purse push puzzle pyramid python question queue quote quoted
    quotes rabbit raccoon race radish raft railway rainbow raise raised raises raisin ranch random range raspberry
    rather raven razor reached read readable reading reads ready real realise really reason reasons received recent
    recipe recognise records recursive reduce refer reference reflect refugee refuse register registry regret
    regular reign reindeer reject rejoice related relative relax release relevant rely remain remaining remedy
    remember remind remove removed repeat replace replaced replacing report reported repr represent request
    requested requests require required requires rescue reset resource response rest restaurant result resulting
    results retire retrieved return returned returning returns reverse rhyme ribbon rice riddle rifle right ring
    rinse risk river rob roof rooster root rope rose rot routine row rub rubber ruby rudder rug ruin rules running
    runs runtime rush safe saffron sailboat salad salmon salt same sandal sandwich sapphire satisfy sauce sausage
    save saxophone scare scarf scatter scent scheme school scissors scold scooter scorch scorpion scrape scratch
    scream screw scribble script scripts scrub sculpture seagull seal search searched season second seconds secret
    section security seed select selected selection self semantics senator sending sends sense sent separate
    separated separator sequence sequences servant server servers sesame sets setting settings setup several shadow
    shared shark shave shawl sheep shell shelter shepherd sheriff shield shirt shiver shock shoe shore short should
    shoulder shovel show shower shown shrimp shrub shrug side sigh signal signature silently silver similar simple
    simply since singer single sip sister size skeleton sketch ski skip skipped skirt skull slap slash sleeve slip
    slipper slow smash smell smile smoke snail snake sneeze sniff snore snow soak soap soccer socket sofa soil
    soldier some something soothe sort sorted soup source sources sow space spaces spade spare spark sparrow spear
    spec special specific specified specifies specify speed spell spice spider spill spinach split spoil spoon spot
    spring sprout square squash squeak squeal squeeze squirrel stable stack stadium stain staircase stamp standard
    stare start started starting starts state statement static statue status stderr stdin stdout steak steam steel
    steer step stew still stir stitch stomach stop store stored stork storm stove strap strawberry stream streams
    strengthen stretch strict string strings strip stroke structure student stuff style subclass subset subtract
    suburb succeed such suffer sugar suggest suit suitable suitcase suite sulphur summer sunset sunshine supper
    supplied support supported supports suppose sure surgeon surprise surround suspect suspend swamp swan swear
    sweater sweep swim swing sword symbolic symbols syntax syrup system systems table tabs tags tailor take taken
    takes taking tambourine tame tangerine tap tapestry target taste teacher teapot tease teddy tells temple
    temporary tempt tennis tent terrify test testing tests than thank that thaw theatre their them then there
    therefore thermometer these they thimble thing things this thorn those though thread threads three throne
    through thumb thunder thus tick tickle tie tiger timber timeout times timestamp tip tire toast tobacco toddler
    together toilet token tomato tongue tool tooth torch tornado tortoise total touch tour tow towel tower toy trace
    traceback tractor trade traffic trail trailing train transport trap treasure treat treated treaty tree tremble
    triangle tribe trick tries triple trophy trot trouble trousers truck true trumpet truncated trunk trust trying
    tuba tug tulip tumble tuple tuples turban turkey turn turnip turtle twig twist type types typically typing
    unchanged uncle undefined under unicode uniform unique unite unittest universe unknown unless unlike unlock
    unpack until update updated upon upper usable usage used useful user users uses using usually utility valid
    validate value values vanilla vanish variable variables various vase vault vegetable vehicle velvet version
    versions very victory view village vinegar vineyard virtual visible visitor vitamin volcano volleyball vote
    voyage vulture waffle wail wait waiter wallet walrus wander want wardrobe warehouse warn warning warrior wasp
    waste waterfall wave wax weapon weather weave weaver wedding weed weep welcome well were whale what whatever
    wheat when whenever where whether which while whine whip whirl whisper whistle whole whose widget widgets widow
    width wife will willow windmill window windows wing wink winter wipe wish with within without wizard wobble wolf
    wonder wool word words work worker working works workshop worm worry would wrap wrapped wrapper wrapping wraps
    wreath wrench wrestle wriggle wrist writable write writes writing written yard yarn yawn yeast yell yield
    yielding yields yogurt your zero zipper zoo zoom
    """)
