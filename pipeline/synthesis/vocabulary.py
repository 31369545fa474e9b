"""Common English words, for names and values that no list of the toolbox holds.

What a model shall copy has to be drawn from far more words than a toolbox has: a token that is never an answer in training
is never an answer afterwards (docs/LOG.md). Everyday words, and the thousand that occur in most docstrings of Python's
standard library; the words in names and parameters of the held-out tools are left out.

Not promised: that a word fits where it is put, or that descriptions and values of the held-out tools share none of them.
"""

from pipeline.synthesis.tool_values import word_list

COMMON = word_list(
    """
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
    """
)
