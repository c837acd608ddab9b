"""The language of the embedded world as data: syllables, kinds of entity, relations and their wordings.

    KINDS      the kinds of entity: how they are named, introduced and referred to
    RELATIONS  the facts about entities: how they are stated, asked about and compared

The wordings of a list mean the same thing; the first is the plainest. In passages, {S} is the subject ("It",
"The town", "Velko"), {P} its possessive and {o} the value. In questions, {s} may also be a whole phrase, as in bridge
questions ("the founder of Velko Works"), so {s} never takes an ending.
"""

from __future__ import annotations

from dataclasses import dataclass

# Syllables: a word is opening + closing or opening + middle + closing. No closing looks like an English ending,
# because a stemmer would then cut off the ends of names and confuse them.
OPENINGS = (
    "bal bel bor bra bri bul dal del dol dra dro dul fal fel fin fla fol gal gel gol gra gul hal hel hol hul jal jel "
    "jol jul kal kel kil kol kra kro kul lem lom lun mal mel mol mul nal nel nil nol nul pel pil plo pra pul ral rel "
    "ril rol rul sal sel ska sko sol sul tal tel til tol tra tro tul val vel vil vol vra wel wol yal yel yol zal zel "
    "zil zol zul bez dez gaz hoz jev kov laz lov mav mez nav nov piv rav rez roz sav siv tav tez viz voz yav zav"
)
MIDDLES = "ba da do fi ga go ja ka ko la lu ma mi mo na ni no pa ra ri ro sa so ta ti to va vi vo za"
CLOSINGS = (
    "ba bek bin bok da dak dek dok dor dra fa fek ga gan gok gor ja jek ka kan kek kin ko kor kra lan lek lok "
    "ma mak mek min mir mok mor na nak nek nik nok nor pa pek pin pok ra ran rek rik ro rok sa sek sik ska sko sok ta "
    "tak tek tik tok tra tun va van vek vik vin vo vok vor za zak zan zek zik zo zok zor"
)

REAL = (  # words and names that the syllables would otherwise make
    "balkan balsa balzan borgata braga branimir brava bravo brigada dallek delfina delta dragomir drama dravida "
    "flanagan flavor galta galvan golda granada halka kalkaska kelvin kilda kolkata lemma lunda malta melvin "
    "mezzo moldova moldovan mulgara noldor prada reznor saldana salsa salva salvador selma skala sullavan talkin "
    "telma tilda troma tulsa volta volvo zelda"
)
MONTHS = "January February March April May June July August September October November December"


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of entity, all of whose members have a passage."""

    noun: str
    share: float  # of the passages
    styles: tuple[str, ...]  # of names; {} is the stem. Empty: given name and surname
    leads: tuple[str, ...]  # the passage's first sentence; {N} is the name, {c} one of the colours
    colours: tuple[str, ...]
    reference: str = "{}"  # the name inside a sentence
    apposition: str = ""  # a longer reference, used in some questions
    short: bool = False  # the stem alone is an accepted answer
    maker: str = ""  # the relation to the person who made it, some decades after that person's birth
    years: tuple[int, int] = (1650, 2000)  # the range of its year if there is no maker


@dataclass(frozen=True, slots=True)
class Relation:
    """A relation between an entity and a value. Every entity has at most one value of each relation."""

    kind: str  # of the entity
    name: str
    value: str  # a kind (then it has a passage), or "person name", "name", "date", "year", "number"
    fact: str  # the clause an agent should remember, {s} and {o}
    keyword: str  # the word to search for beside the name; only one, since more would outweigh the name
    says: tuple[str, ...]
    asks: tuple[str, ...]
    phrases: tuple[str, ...] = ()  # the value as a phrase, if it has a passage
    inverse: tuple[str, ...] = ()  # asks for the entity, given the value
    more: tuple[str, ...] = ()  # compares two: which has the higher value, {a} or {b}?
    less: tuple[str, ...] = ()
    low: int = 0  # numbers
    high: int = 0
    unit: str = ""
    names: tuple[str, ...] = ()  # patterns of names without a passage; {} is a surname
    gap: int | None = None  # the value is at least this many years older than the entity
    counted: tuple[str, ...] = ()  # other units in which a number may be given


KINDS: dict[str, Kind] = {
    "person": Kind(
        noun="person",
        share=0.30,
        styles=(),
        leads=("{N} was {c}.", "{N} worked as {c}.", "{N} is remembered as {c}.", "{N} made a living as {c}."),
        colours=(
            "a painter", "a doctor", "a poet", "an engineer", "a lawyer", "a farmer", "a singer", "a teacher",
            "a sailor", "a baker", "a judge", "an actor", "a weaver", "a dancer", "a chemist", "a gardener",
        ),
        years=(1600, 1940),
    ),
    "town": Kind(
        noun="town",
        share=0.15,
        styles=("{}", "{}", "{}", "{}", "Port {}", "New {}", "Upper {}", "Lower {}"),
        leads=(
            "{N} is a town known for {c}.", "{N} is a small town famous for {c}.", "{N} is a town that lives off {c}.",
            "{N} is an old town with a name for {c}.",
        ),
        colours=("cheese", "orchards", "glass", "wool", "salt", "horses", "honey", "pottery", "silver", "roses"),
        apposition="the town of {}",
    ),
    "river": Kind(
        noun="river",
        share=0.08,
        styles=("{} River", "{} River", "{} Water", "{} Brook"),
        leads=("{N} is {c} river.", "{N} is known as {c} river.", "{N} is {c} river with many fish.",
               "{N} is {c} river among low hills."),
        colours=("a slow", "a cold", "a deep", "a narrow", "a muddy", "a clear", "a quiet", "a winding"),
        reference="the {}",
        short=True,
    ),
    "company": Kind(
        noun="company",
        share=0.12,
        styles=("{} Works", "{} Group", "{} Brothers", "{} Union", "{} Partners", "{} Guild"),
        leads=("{N} is {c} company.", "{N} is {c} company with many customers.", "{N} grew into {c} company.",
               "{N} is known as {c} company."),
        colours=("a family", "a trading", "a large", "a private", "a modest", "a thriving", "a cautious", "a proud"),
        apposition="the company {}",
        short=True,
        maker="founder",
    ),
    "book": Kind(
        noun="book",
        share=0.11,
        styles=(
            "The Oath of {}", "The Lamp of {}", "The Winter of {}", "The Tower of {}", "The Mirror of {}",
            "The Crown of {}", "The Shadow of {}", "The Secret of {}",
        ),
        leads=("{N} is {c}.", "{N} is {c} for all ages.", "{N} is best described as {c}.", "{N} is read as {c}."),
        colours=("a novel", "a love story", "a crime story", "a satire", "a fable", "a comedy", "a tragedy"),
        apposition="the book {}",
        maker="author",
    ),
    "ship": Kind(
        noun="ship",
        share=0.08,
        styles=("{} Star", "{} Queen", "{} Dawn", "{} Spirit", "{} Pearl", "{} Eagle"),
        leads=("{N} is {c}.", "{N} is {c} with a steel hull.", "{N} is {c} of the old kind.", "{N} served as {c}."),
        colours=("a ferry", "a cargo ship", "a whaler", "a mail ship", "a tanker", "a training ship", "a trawler"),
        reference="the {}",
        apposition="the ship {}",
        years=(1690, 2010),
    ),
    "school": Kind(
        noun="school",
        share=0.08,
        styles=("{} Academy", "{} College", "{} Institute", "{} Seminary"),
        leads=("{N} is a school known for {c}.", "{N} is a school that teaches {c}.", "{N} is a school strong in {c}.",
               "{N} is a school with a name for {c}."),
        colours=("music", "law", "medicine", "drawing", "grammar", "mining", "botany", "rowing", "algebra"),
        apposition="the school {}",
        short=True,
        maker="head",
    ),
    "festival": Kind(
        noun="festival",
        share=0.08,
        styles=("{} Festival", "{} Fair", "{} Carnival", "{} Games"),
        leads=("{N} is a festival of {c}.", "{N} is a festival that celebrates {c}.", "{N} is a festival about {c}.",
               "{N} is a yearly festival of {c}."),
        colours=("song", "dance", "bread", "puppets", "lanterns", "kites", "poetry", "cider", "drums"),
        reference="the {}",
        maker="founder",
    ),
}  # fmt: skip


RELATIONS: tuple[Relation, ...] = (
    Relation(
        "person", "birthday", "date", "{s} was born on {o}", "born",
        says=("{S} was born on {o}.", "{P} date of birth was {o}.", "{P} day of birth was {o}.",
              "{S} came into the world on {o}."),
        asks=("When was {s} born?", "On what date was {s} born?", "What is the date of birth of {s}?",
              "On which day did {s} come into the world?"),
        more=("Who was born later, {a} or {b}?", "Who is younger, {a} or {b}?",
              "Which person was born later, {a} or {b}?", "Who of these two is the younger, {a} or {b}?"),
        less=("Who was born first, {a} or {b}?", "Who is older, {a} or {b}?",
              "Which person was born earlier, {a} or {b}?", "Who of these two is the older, {a} or {b}?"),
    ),
    Relation(
        "person", "birthplace", "town", "{s} was born in {o}", "born",
        says=("{S} was born in {o}.", "{P} birthplace was {o}.", "{S} came from {o}.", "{P} native town was {o}."),
        asks=("Where was {s} born?", "In which town was {s} born?", "What is the birthplace of {s}?",
              "Which town did {s} come from?"),
        phrases=("the town where {s} was born", "the birthplace of {s}", "the native town of {s}",
                 "the town that {s} came from"),
    ),
    Relation(
        "person", "school", "school", "{s} studied at {o}", "studied",
        says=("{S} studied at {o}.", "{S} was educated at {o}.", "{S} attended {o}.", "{S} was a pupil of {o}."),
        asks=("Where did {s} study?", "At which school was {s} educated?", "Which school did {s} attend?",
              "Of which school was {s} a pupil?"),
        phrases=("the school where {s} studied", "the school where {s} was educated", "the school that {s} attended",
                 "the school that had {s} as a pupil"),
        gap=-8,
    ),
    Relation(
        "person", "spouse", "person name", "{s} was married to {o}", "married",
        says=("{S} was married to {o}.", "{P} spouse was {o}.", "{S} married {o}.", "{S} shared a home with {o}."),
        asks=("Who was {s} married to?", "Who was the spouse of {s}?", "Whom did {s} marry?",
              "With whom did {s} share a home?"),
        inverse=("Who was married to {o}?", "Whose spouse was {o}?", "Who married {o}?", "Who shared a home with {o}?"),
    ),
    Relation(
        "town", "population", "number", "{s} has {o} inhabitants", "population",
        says=("{S} has {o} inhabitants.", "{S} is home to {o} people.", "{P} population is {o}.",
              "{S} counts {o} residents."),
        asks=("How many inhabitants does {s} have?", "How many people live in {s}?", "What is the population of {s}?",
              "How many residents does {s} count?"),
        more=("Which town has more inhabitants, {a} or {b}?", "Where do more people live, in {a} or in {b}?",
              "Which town has the larger population, {a} or {b}?", "Which town counts more residents, {a} or {b}?"),
        less=("Which town has fewer inhabitants, {a} or {b}?", "Where do fewer people live, in {a} or in {b}?",
              "Which town has the smaller population, {a} or {b}?", "Which town counts fewer residents, {a} or {b}?"),
        low=300, high=60_000, counted=("inhabitants", "people", "residents"),
    ),
    Relation(
        "town", "river", "river", "{s} stands on {o}", "stands",
        says=("{S} stands on {o}.", "{S} lies on the banks of {o}.", "{S} was built beside {o}.",
              "{S} gets its water from {o}."),
        asks=("On which river does {s} stand?", "On the banks of which river does {s} lie?",
              "Beside which river was {s} built?", "From which river does {s} get its water?"),
        phrases=("the river on which {s} stands", "the river where {s} lies", "the river beside which {s} was built",
                 "the river that gives {s} its water"),
    ),
    Relation(
        "town", "mayor", "person", "the first mayor of {s} was {o}", "mayor",
        says=("{P} first mayor was {o}.", "{S} elected {o} as its first mayor.", "{S} was first led by mayor {o}.",
              "{S} had {o} as its first mayor."),
        asks=("Who was the first mayor of {s}?", "Who was elected the first mayor of {s}?",
              "Which mayor was the first to lead {s}?", "Whom did {s} have as its first mayor?"),
        phrases=("the first mayor of {s}", "the person elected first mayor of {s}", "the mayor who first led {s}",
                 "the person that {s} had as its first mayor"),
    ),
    Relation(
        "town", "street", "name", "the main street of {s} is {o}", "street",
        says=("{P} main street is {o}.", "{P} main street is called {o}.", "{S} has {o} as its main street.",
              "{P} shops stand along {o}, the main street."),
        asks=("What is the main street of {s}?", "What is the main street of {s} called?",
              "Which street does {s} have as its main street?", "Along which main street do the shops of {s} stand?"),
        names=("{} Street", "{} Road", "{} Lane"),
    ),
    Relation(
        "river", "length", "number", "{s} is {o} long", "length",
        says=("{S} is {o} long.", "{P} length is {o}.", "{S} runs for {o}.", "{S} measures {o} from end to end."),
        asks=("How long is {s}?", "What is the length of {s}?", "How far does {s} run?",
              "How many kilometres does {s} measure from end to end?"),
        more=("Which river is longer, {a} or {b}?", "Which is the longer river, {a} or {b}?",
              "Which river runs farther, {a} or {b}?", "Which river measures more from end to end, {a} or {b}?"),
        less=("Which river is shorter, {a} or {b}?", "Which is the shorter river, {a} or {b}?",
              "Which river runs less far, {a} or {b}?", "Which river measures less from end to end, {a} or {b}?"),
        low=40, high=1_900, unit="km", counted=("kilometres",),
    ),
    Relation(
        "river", "mouth", "name", "{s} flows into {o}", "flows",
        says=("{S} flows into {o}.", "{S} empties into {o}.", "{P} mouth is at {o}.", "{S} ends in {o}."),
        asks=("What does {s} flow into?", "What does {s} empty into?", "Where is the mouth of {s}?",
              "In what does {s} end?"),
        names=("Lake {}", "{} Bay", "{} Marsh"),
    ),
    Relation(
        "river", "source", "town", "{s} rises near {o}", "source",
        says=("{S} rises near {o}.", "{P} source is near {o}.", "{S} begins near {o}.", "{S} springs up near {o}."),
        asks=("Near which town does {s} rise?", "Near which town is the source of {s}?",
              "Near which town does {s} begin?", "Near which town does {s} spring up?"),
        phrases=("the town near which {s} rises", "the town near the source of {s}", "the town near which {s} begins",
                 "the town near which {s} springs up"),
    ),
    Relation(
        "river", "bridge", "name", "the oldest bridge over {s} is {o}", "bridge",
        says=("{P} oldest bridge is {o}.", "{S} was first crossed by {o}.", "{P} oldest bridge is called {o}.",
              "{S} is spanned by {o}, its oldest bridge."),
        asks=("What is the oldest bridge over {s}?", "Which bridge was the first to cross {s}?",
              "What is the oldest bridge over {s} called?", "Which is the oldest bridge that spans {s}?"),
        names=("{} Bridge", "{} Crossing"),
    ),
    Relation(
        "company", "founder", "person", "{s} was founded by {o}", "founder",
        says=("{S} was founded by {o}.", "{P} founder was {o}.", "{S} was set up by {o}.", "{S} was started by {o}."),
        asks=("Who founded {s}?", "Who was the founder of {s}?", "Who set up {s}?", "By whom was {s} started?"),
        phrases=("the person who founded {s}", "the founder of {s}", "the person who set up {s}",
                 "the person who started {s}"),
    ),
    Relation(
        "company", "founded", "year", "{s} was founded in {o}", "founded",
        says=("{S} was founded in {o}.", "{S} dates from {o}.", "{S} opened in {o}.", "{S} began its business in {o}."),
        asks=("When was {s} founded?", "From which year does {s} date?", "In which year did {s} open?",
              "In what year did {s} begin its business?"),
        more=("Which company was founded later, {a} or {b}?", "Which company is younger, {a} or {b}?",
              "Which company opened later, {a} or {b}?", "Which company began its business later, {a} or {b}?"),
        less=("Which company was founded earlier, {a} or {b}?", "Which company is older, {a} or {b}?",
              "Which company opened first, {a} or {b}?", "Which company began its business first, {a} or {b}?"),
    ),
    Relation(
        "company", "seat", "town", "{s} is based in {o}", "based",
        says=("{S} is based in {o}.", "{P} head office is in {o}.", "{S} has its headquarters in {o}.",
              "{S} is run from {o}."),
        asks=("In which town is {s} based?", "Where is the head office of {s}?", "Where are the headquarters of {s}?",
              "From which town is {s} run?"),
        phrases=("the town where {s} is based", "the town with the head office of {s}",
                 "the town with the headquarters of {s}", "the town from which {s} is run"),
    ),
    Relation(
        "company", "product", "name", "the main product of {s} is the {o}", "product",
        says=("{P} main product is the {o}.", "{S} is best known for the {o}.", "{S} mostly sells the {o}.",
              "{S} made its fortune with the {o}."),
        asks=("What is the main product of {s}?", "For which product is {s} best known?",
              "Which product does {s} mostly sell?", "With which product did {s} make its fortune?"),
        names=("{} clock", "{} stove", "{} plough", "{} saw", "{} pump"),
    ),
    Relation(
        "book", "author", "person", "{s} was written by {o}", "author",
        says=("{S} was written by {o}.", "{P} author is {o}.", "{S} is the work of {o}.",
              "{S} came from the pen of {o}."),
        asks=("Who wrote {s}?", "Who is the author of {s}?", "Whose work is {s}?", "From whose pen did {s} come?"),
        phrases=("the person who wrote {s}", "the author of {s}", "the writer whose work is {s}",
                 "the person from whose pen {s} came"),
    ),
    Relation(
        "book", "published", "year", "{s} was published in {o}", "published",
        says=("{S} was published in {o}.", "{S} appeared in {o}.", "{S} came out in {o}.",
              "{S} was first printed in {o}."),
        asks=("When was {s} published?", "In which year did {s} appear?", "In what year did {s} come out?",
              "When was {s} first printed?"),
        more=("Which book was published later, {a} or {b}?", "Which book appeared later, {a} or {b}?",
              "Which book came out later, {a} or {b}?", "Which book was printed later, {a} or {b}?"),
        less=("Which book was published earlier, {a} or {b}?", "Which book appeared first, {a} or {b}?",
              "Which book came out first, {a} or {b}?", "Which book was printed first, {a} or {b}?"),
    ),
    Relation(
        "book", "publisher", "company", "the publisher of {s} was {o}", "publisher",
        says=("{P} publisher was {o}.", "{S} was brought out by {o}.", "{S} was published by {o}.",
              "{S} was printed and sold by {o}."),
        asks=("Who was the publisher of {s}?", "Which company brought out {s}?", "By which company was {s} published?",
              "Which company printed and sold {s}?"),
        phrases=("the publisher of {s}", "the company that brought out {s}", "the company that published {s}",
                 "the company that printed and sold {s}"),
        gap=0,
    ),
    Relation(
        "book", "hero", "person name", "the hero of {s} is {o}", "hero",
        says=("{P} hero is {o}.", "{P} main character is {o}.", "{S} tells the story of {o}.",
              "{S} follows the life of {o}."),
        asks=("Who is the hero of {s}?", "Who is the main character of {s}?", "Whose story does {s} tell?",
              "Whose life does {s} follow?"),
        inverse=("Which book has {o} as its hero?", "Which book has {o} as its main character?",
                 "Which book tells the story of {o}?", "Which book follows the life of {o}?"),
    ),
    Relation(
        "book", "pages", "number", "{s} has {o} pages", "pages",
        says=("{S} has {o} pages.", "{S} runs to {o} pages.", "{S} fills {o} pages.", "{S} is {o} pages long."),
        asks=("How many pages does {s} have?", "To how many pages does {s} run?", "How many pages does {s} fill?",
              "How many pages long is {s}?"),
        more=("Which book has more pages, {a} or {b}?", "Which book runs to more pages, {a} or {b}?",
              "Which book fills more pages, {a} or {b}?", "Which book is longer, {a} or {b}?"),
        less=("Which book has fewer pages, {a} or {b}?", "Which book runs to fewer pages, {a} or {b}?",
              "Which book fills fewer pages, {a} or {b}?", "Which book is shorter, {a} or {b}?"),
        low=90, high=990, counted=("pages",),
    ),
    Relation(
        "ship", "builder", "company", "{s} was built by {o}", "builder",
        says=("{S} was built by {o}.", "{P} builder was {o}.", "{S} was made by {o}.", "{S} was constructed by {o}."),
        asks=("Who built {s}?", "Who was the builder of {s}?", "Which company made {s}?",
              "By which company was {s} constructed?"),
        phrases=("the company that built {s}", "the builder of {s}", "the company that made {s}",
                 "the company that constructed {s}"),
        gap=0,
    ),
    Relation(
        "ship", "launched", "year", "{s} was launched in {o}", "launched",
        says=("{S} was launched in {o}.", "{S} first went to sea in {o}.", "{S} entered service in {o}.",
              "{P} maiden voyage was in {o}."),
        asks=("When was {s} launched?", "In which year did {s} first go to sea?",
              "In what year did {s} enter service?", "When was the maiden voyage of {s}?"),
        more=("Which ship was launched later, {a} or {b}?", "Which ship went to sea later, {a} or {b}?",
              "Which ship entered service later, {a} or {b}?", "Which ship made its maiden voyage later, {a} or {b}?"),
        less=("Which ship was launched earlier, {a} or {b}?", "Which ship went to sea first, {a} or {b}?",
              "Which ship entered service first, {a} or {b}?", "Which ship made its maiden voyage first, {a} or {b}?"),
    ),
    Relation(
        "ship", "size", "number", "{s} is {o} long", "length",
        says=("{S} is {o} long.", "{P} length is {o}.", "{S} measures {o}.", "{P} hull has a length of {o}."),
        asks=("How long is {s}?", "What is the length of {s}?", "How many metres does {s} measure?",
              "What is the length of the hull of {s}?"),
        more=("Which ship is longer, {a} or {b}?", "Which is the longer ship, {a} or {b}?",
              "Which ship measures more metres, {a} or {b}?", "Which ship has the longer hull, {a} or {b}?"),
        less=("Which ship is shorter, {a} or {b}?", "Which is the shorter ship, {a} or {b}?",
              "Which ship measures fewer metres, {a} or {b}?", "Which ship has the shorter hull, {a} or {b}?"),
        low=20, high=340, unit="metres", counted=("m",),
    ),
    Relation(
        "ship", "port", "town", "the home port of {s} is {o}", "port",
        says=("{P} home port is {o}.", "{S} sails from {o}.", "{S} is registered in {o}.", "{S} belongs to {o}."),
        asks=("What is the home port of {s}?", "From which town does {s} sail?", "In which town is {s} registered?",
              "To which town does {s} belong?"),
        phrases=("the home port of {s}", "the town from which {s} sails", "the town where {s} is registered",
                 "the town to which {s} belongs"),
    ),
    Relation(
        "ship", "captain", "person name", "the first captain of {s} was {o}", "captain",
        says=("{P} first captain was {o}.", "{S} was first commanded by {o}.", "{S} first sailed under {o}.",
              "{S} had {o} as its first captain."),
        asks=("Who was the first captain of {s}?", "Who first commanded {s}?", "Under whom did {s} first sail?",
              "Whom did {s} have as its first captain?"),
        inverse=("Which ship had {o} as its first captain?", "Which ship was first commanded by {o}?",
                 "Which ship first sailed under {o}?", "Of which ship was {o} the first captain?"),
    ),
    Relation(
        "school", "opened", "year", "{s} was opened in {o}", "opened",
        says=("{S} was opened in {o}.", "{S} took its first pupils in {o}.", "{S} has existed since {o}.",
              "{S} was established in {o}."),
        asks=("When was {s} opened?", "In which year did {s} take its first pupils?",
              "Since which year has {s} existed?", "In what year was {s} established?"),
        more=("Which school was opened later, {a} or {b}?", "Which school took its first pupils later, {a} or {b}?",
              "Which school is younger, {a} or {b}?", "Which school was established later, {a} or {b}?"),
        less=("Which school was opened earlier, {a} or {b}?", "Which school took its first pupils earlier, {a} or {b}?",
              "Which school is older, {a} or {b}?", "Which school was established earlier, {a} or {b}?"),
    ),
    Relation(
        "school", "place", "town", "{s} is located in {o}", "located",
        says=("{S} is located in {o}.", "{S} can be found in {o}.", "{P} buildings are in {o}.",
              "{S} has its home in {o}."),
        asks=("In which town is {s} located?", "In which town can {s} be found?", "Where are the buildings of {s}?",
              "In which town does {s} have its home?"),
        phrases=("the town where {s} is located", "the town where {s} can be found",
                 "the town with the buildings of {s}", "the town where {s} has its home"),
    ),
    Relation(
        "school", "head", "person", "the first head of {s} was {o}", "head",
        says=("{P} first head was {o}.", "{S} was first run by {o}.", "{S} had {o} as its first head.",
              "{S} opened under {o}, its first head."),
        asks=("Who was the first head of {s}?", "Who was the first to run {s}?", "Whom did {s} have as its first head?",
              "Under which first head did {s} open?"),
        phrases=("the first head of {s}", "the person who first ran {s}", "the person that {s} had as its first head",
                 "the first head under whom {s} opened"),
    ),
    Relation(
        "school", "pupils", "number", "{s} has {o} pupils", "pupils",
        says=("{S} has {o} pupils.", "{S} is attended by {o} pupils.", "{S} teaches {o} children.",
              "{S} has places for {o} pupils."),
        asks=("How many pupils does {s} have?", "How many pupils attend {s}?", "How many children does {s} teach?",
              "For how many pupils does {s} have places?"),
        more=("Which school has more pupils, {a} or {b}?", "Which school is attended by more pupils, {a} or {b}?",
              "Which school teaches more children, {a} or {b}?",
              "Which school has places for more pupils, {a} or {b}?"),
        less=("Which school has fewer pupils, {a} or {b}?", "Which school is attended by fewer pupils, {a} or {b}?",
              "Which school teaches fewer children, {a} or {b}?",
              "Which school has places for fewer pupils, {a} or {b}?"),
        low=60, high=2_400, counted=("pupils", "children"),
    ),
    Relation(
        "festival", "founder", "person", "{s} was started by {o}", "started",
        says=("{S} was started by {o}.", "{S} was the idea of {o}.", "{S} was created by {o}.",
              "{S} goes back to {o}."),
        asks=("Who started {s}?", "Whose idea was {s}?", "Who created {s}?", "To which person does {s} go back?"),
        phrases=("the person who started {s}", "the person whose idea was {s}", "the person who created {s}",
                 "the person to whom {s} goes back"),
    ),
    Relation(
        "festival", "begun", "year", "{s} was first held in {o}", "held",
        says=("{S} was first held in {o}.", "{S} took place for the first time in {o}.",
              "{S} has been held since {o}.", "{P} first year was {o}."),
        asks=("When was {s} first held?", "In which year did {s} first take place?",
              "Since which year has {s} been held?", "What was the first year of {s}?"),
        more=("Which festival was first held later, {a} or {b}?", "Which festival first took place later, {a} or {b}?",
              "Which festival is younger, {a} or {b}?", "Which festival had its first year later, {a} or {b}?"),
        less=("Which festival was first held earlier, {a} or {b}?",
              "Which festival first took place earlier, {a} or {b}?",
              "Which festival is older, {a} or {b}?", "Which festival had its first year earlier, {a} or {b}?"),
    ),
    Relation(
        "festival", "place", "town", "{s} is held in {o}", "held",
        says=("{S} is held in {o}.", "{S} takes place in {o}.", "{S} fills the streets of {o}.", "{P} home is {o}."),
        asks=("In which town is {s} held?", "Where does {s} take place?", "Which town has its streets filled by {s}?",
              "Which town is the home of {s}?"),
        phrases=("the town where {s} is held", "the town where {s} takes place",
                 "the town whose streets are filled by {s}", "the town that is the home of {s}"),
    ),
    Relation(
        "festival", "visitors", "number", "{s} draws {o} visitors", "visitors",
        says=("{S} draws {o} visitors.", "{S} attracts {o} guests.", "{S} is visited by {o} people.",
              "{S} welcomes {o} visitors a year."),
        asks=("How many visitors does {s} draw?", "How many guests does {s} attract?", "How many people visit {s}?",
              "How many visitors a year does {s} welcome?"),
        more=("Which festival draws more visitors, {a} or {b}?", "Which festival attracts more guests, {a} or {b}?",
              "Which festival is visited by more people, {a} or {b}?",
              "Which festival welcomes more visitors a year, {a} or {b}?"),
        less=("Which festival draws fewer visitors, {a} or {b}?", "Which festival attracts fewer guests, {a} or {b}?",
              "Which festival is visited by fewer people, {a} or {b}?",
              "Which festival welcomes fewer visitors a year, {a} or {b}?"),
        low=300, high=60_000, counted=("visitors", "guests", "people"),
    ),
    Relation(
        "festival", "prize", "name", "the top prize of {s} is the {o}", "prize",
        says=("{P} top prize is the {o}.", "{S} awards the {o} as its top prize.", "{P} winner takes the {o}.",
              "{S} ends with the award of the {o}."),
        asks=("What is the top prize of {s}?", "What does {s} award as its top prize?",
              "What does the winner of {s} take?", "With which award does {s} end?"),
        names=("{} Cup", "{} Medal", "{} Trophy"),
    ),
)  # fmt: skip

WORDINGS = 4  # in every list above
