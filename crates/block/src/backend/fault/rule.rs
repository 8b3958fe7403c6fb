//! What is to go wrong, in a line.
//!
//! ```text
//!   rules      = rule *( ";" rule )
//!   rule       = effect ":" operations [ "@" first [ "-" last ] ] [ "+" skip ]
//!                [ "/" every | "~" chance ] [ "x" times ]
//!   effect     = error | error-path | error-internal | error-full | error-aborted
//!              | hang | drop | corrupt | tear | short
//!   operations = any | operation *( "," operation )
//!
//!   error:write@0-1023x3       the first three writes that touch blocks 0 to 1023
//!   hang:any+100               everything after the first hundred requests
//!   corrupt:read,write/10      every tenth read or write
//!   tear:write~50x1            a write, each with the chance of one in fifty, once
//! ```
//!
//! A request is held against the rules in their order, and the first that strikes has it. `first`
//! and `last` are blocks; a request without blocks, such as a flush, touches none.

use std::fmt;
use std::str::FromStr;

use base::{Operation, Outcome, Random, Request};

/// What goes wrong, and when.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// What happens.
    pub effect: Effect,
    /// To which operations.
    pub operations: Vec<Operation>,
    /// Only to requests that touch these blocks, from the first to the last.
    pub blocks: Option<(u64, u64)>,
    /// To how many of them it does not happen at first.
    pub skip: u64,
    /// To which of the others it does.
    pub when: When,
    /// How often at most.
    pub times: u64,
}

/// What happens to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// It is answered with an error and not carried out: with this outcome, or else the one of a
    /// medium that can no longer do such a thing.
    Error(Option<Outcome>),
    /// It is carried out, and its answer is kept back until it is let go by hand.
    Hang,
    /// It is neither carried out nor answered. Its place is lost for as long as the channel lives.
    Drop,
    /// One to three bits of its data are wrong: of what a read returns, or what a write stores. It
    /// succeeds.
    Corrupt,
    /// A write stores some of its first blocks, and fails.
    Tear,
    /// It is carried out for some of its first blocks only, and succeeds.
    Short,
}

/// To which requests it happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// Each of so many: one for all of them.
    Every(u64),
    /// One in so many, by chance.
    Chance(u64),
}

/// A rule, and what has come of it.
#[derive(Clone, Debug)]
pub(super) struct Rules {
    rules: Vec<(Rule, Record)>,
    seed: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Record {
    /// Requests that were held against the rule and are of its kind.
    seen: u64,
    struck: u64,
}

/// What is to happen to a request, unless it is not taken after all.
#[derive(Clone, Debug)]
pub(super) struct Strike {
    pub(super) effect: Effect,
    /// What the rest of it is drawn from.
    pub(super) random: Random,
    /// The rule that struck.
    rule: usize,
}

const EFFECTS: [(&str, Effect); 10] = [
    ("error", Effect::Error(None)),
    ("error-path", Effect::Error(Some(Outcome::PATH_ERROR))),
    ("error-internal", Effect::Error(Some(Outcome::INTERNAL_ERROR))),
    ("error-full", Effect::Error(Some(Outcome::CAPACITY_EXCEEDED))),
    ("error-aborted", Effect::Error(Some(Outcome::ABORTED))),
    ("hang", Effect::Hang),
    ("drop", Effect::Drop),
    ("corrupt", Effect::Corrupt),
    ("tear", Effect::Tear),
    ("short", Effect::Short),
];

impl Effect {
    fn name(self) -> &'static str {
        EFFECTS.iter().find(|(_, effect)| *effect == self).map_or("error", |(name, _)| name)
    }

    /// Whether it can happen to such a request.
    fn is_for(self, operation: Operation) -> bool {
        match self {
            Self::Error(_) | Self::Hang | Self::Drop => true,
            Self::Corrupt => matches!(operation, Operation::Read | Operation::Write),
            Self::Tear => operation == Operation::Write,
            Self::Short => !matches!(operation, Operation::Flush | Operation::CompareAndWrite),
        }
    }

    fn operations(self) -> Vec<Operation> {
        Operation::ALL.into_iter().filter(|operation| self.is_for(*operation)).collect()
    }
}

impl Rule {
    /// This effect on everything that it can happen to.
    pub fn always(effect: Effect) -> Self {
        let (blocks, skip, when, times) = (None, 0, When::Every(1), u64::MAX);
        Self { effect, operations: effect.operations(), blocks, skip, when, times }
    }

    /// Several rules, from their line. No rules from an empty one.
    ///
    /// # Errors
    ///
    /// Which of them is not one, and what would be.
    pub fn parse_all(text: &str) -> Result<Vec<Self>, String> {
        text.split(';').filter(|rule| !rule.is_empty()).map(str::parse).collect()
    }

    fn is_about(&self, request: &Request) -> bool {
        let touches = |first: u64, (from, to): (u64, u64)| {
            let end = first.saturating_add(u64::from(request.blocks));
            first <= to && end > from
        };
        let is_copy = request.operation == Operation::Copy;
        self.operations.contains(&request.operation)
            && self.blocks.is_none_or(|blocks| {
                let source = is_copy && touches(request.operand, blocks);
                let has_blocks = request.operation != Operation::Flush;
                has_blocks && (touches(request.lba, blocks) || source)
            })
    }
}

impl Rules {
    pub(super) fn new(rules: Vec<Rule>, seed: u64) -> Self {
        let rules = rules.into_iter().map(|rule| (rule, Record::default())).collect();
        Self { rules, seed }
    }

    pub(super) fn as_list(&self) -> Vec<(Rule, u64)> {
        self.rules.iter().map(|(rule, record)| (rule.clone(), record.struck)).collect()
    }

    /// Which rule strikes a request, if any. Nothing is counted before it has been
    /// [`taken`](Self::taken).
    pub(super) fn strike(&self, request: &Request) -> Option<Strike> {
        self.rules.iter().enumerate().find_map(|(index, (rule, record))| {
            if !rule.is_about(request) || record.struck >= rule.times || record.seen < rule.skip {
                return None;
            }
            // A stream for each request of each rule: whether somebody asks twice does not matter.
            let mut random = Random::new(self.seed ^ (index as u64) << 48 ^ record.seen);
            let strikes = match rule.when {
                When::Every(every) => (record.seen - rule.skip + 1).is_multiple_of(every),
                When::Chance(chance) => random.chance(1, chance),
            };
            strikes.then_some(Strike { effect: rule.effect, random, rule: index })
        })
    }

    /// Counts a request that was taken, and what struck it.
    pub(super) fn taken(&mut self, request: &Request, strike: Option<&Strike>) {
        let last = strike.map_or(usize::MAX, |strike| strike.rule);
        for (index, (rule, record)) in self.rules.iter_mut().enumerate() {
            if index <= last && rule.is_about(request) {
                record.seen += 1;
                record.struck += u64::from(index == last);
            }
        }
    }
}

impl FromStr for Rule {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let names = || EFFECTS.map(|(name, _)| name).join(", ");
        let (effect, rest) = text
            .split_once(':')
            .ok_or_else(|| format!("`{text}` is not a rule, expected one such as error:write"))?;
        let (_, effect) = *EFFECTS
            .iter()
            .find(|(name, _)| *name == effect)
            .ok_or_else(|| format!("`{effect}` is not an effect, expected one of {}", names()))?;
        let end = rest.find(['@', '+', '/', '~', 'x']).unwrap_or(rest.len());
        let (operations, mut rest) = rest.split_at(end);
        let mut rule =
            Self { operations: parse_operations(effect, operations)?, ..Self::always(effect) };
        if let Some(first) = cut_number(&mut rest, '@')? {
            let last = cut_number(&mut rest, '-')?.unwrap_or(first);
            if last < first {
                return Err(format!("blocks {first}-{last} in `{text}`, expected the lower first"));
            }
            rule.blocks = Some((first, last));
        }
        rule.skip = cut_number(&mut rest, '+')?.unwrap_or(0);
        if let Some(every) = cut_number(&mut rest, '/')? {
            rule.when = When::Every(every);
        } else if let Some(chance) = cut_number(&mut rest, '~')? {
            rule.when = When::Chance(chance);
        }
        if matches!(rule.when, When::Every(0) | When::Chance(0)) {
            return Err(format!("one in 0 in `{text}`, expected at least one in 1"));
        }
        rule.times = cut_number(&mut rest, 'x')?.unwrap_or(u64::MAX);
        if rest.is_empty() { Ok(rule) } else { Err(bad_rest(text, rest)) }
    }
}

fn bad_rest(text: &str, rest: &str) -> String {
    format!(
        "`{rest}` in `{text}` is not understood, expected @FIRST-LAST, +SKIP, /EVERY or ~CHANCE, \
         xTIMES in this order"
    )
}

fn parse_operations(effect: Effect, text: &str) -> Result<Vec<Operation>, String> {
    if text == "any" {
        return Ok(effect.operations());
    }
    let mut operations = Vec::new();
    for name in text.split(',') {
        let found = effect.operations().into_iter().find(|operation| operation.name() == name);
        let operation = found.ok_or_else(|| {
            let names: Vec<&str> = effect.operations().iter().map(|one| one.name()).collect();
            let names = names.join(", ");
            format!("`{name}` is nothing to {}, expected any or some of {names}", effect.name())
        })?;
        if operations.contains(&operation) {
            return Err(format!("{name} is named twice in `{text}`, expected once"));
        }
        operations.push(operation);
    }
    Ok(operations)
}

/// Takes a mark and the number after it off the front, if the mark is there.
fn cut_number(rest: &mut &str, mark: char) -> Result<Option<u64>, String> {
    let Some(after) = rest.strip_prefix(mark) else { return Ok(None) };
    let end = after.bytes().position(|byte| !byte.is_ascii_digit()).unwrap_or(after.len());
    let (digits, left) = after.split_at(end);
    let number = digits
        .parse()
        .map_err(|_| format!("`{digits}` follows `{mark}`, expected a number below 2^64"))?;
    *rest = left;
    Ok(Some(number))
}

impl fmt::Display for Rule {
    /// Writes a rule that is read back as the same.
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { effect, operations, blocks, skip, when, times } = self;
        write!(out, "{}:", effect.name())?;
        if *operations == effect.operations() && operations.len() > 1 {
            write!(out, "any")?;
        } else {
            let names: Vec<&str> = operations.iter().map(|operation| operation.name()).collect();
            write!(out, "{}", names.join(","))?;
        }
        match blocks {
            Some((first, last)) if first == last => write!(out, "@{first}")?,
            Some((first, last)) => write!(out, "@{first}-{last}")?,
            None => {}
        }
        if *skip > 0 {
            write!(out, "+{skip}")?;
        }
        match when {
            When::Every(1) => {}
            When::Every(every) => write!(out, "/{every}")?,
            When::Chance(chance) => write!(out, "~{chance}")?,
        }
        if *times < u64::MAX { write!(out, "x{times}") } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use base::{Flags, Operation, Request};

    use super::{Effect, Rule, Rules};

    fn request(operation: Operation, lba: u64) -> Request {
        let blocks = if operation == Operation::Flush { 0 } else { 4 };
        Request {
            token: 0,
            lba,
            operand: 0,
            segment_first: 0,
            blocks,
            segment_count: 0,
            metadata_count: 0,
            operation,
            flags: Flags::NONE,
        }
    }

    /// Which of `count` reads are struck.
    fn struck(rule: &str, count: usize) -> Vec<usize> {
        let mut rules = Rules::new(Rule::parse_all(rule).unwrap(), 5);
        let request = request(Operation::Read, 0);
        let one = |_: &usize| {
            let strike = rules.strike(&request);
            rules.taken(&request, strike.as_ref());
            strike.is_some()
        };
        (0..count).filter(one).collect()
    }

    #[test]
    fn a_rule_is_read_and_written_back() {
        for text in [
            "error:write@0-1023x3",
            "hang:any+100",
            "corrupt:any/10",
            "corrupt:write",
            "tear:write@7~50x1",
            "short:read,write-zeroes@5+2/3x4",
            "drop:flush",
            "error-path:any",
            "error-full:write,copy",
        ] {
            assert_eq!(text.parse::<Rule>().unwrap().to_string(), text);
        }
        let two = Rule::parse_all("error:read;;hang:any;").unwrap();
        assert_eq!(two.len(), 2);
        assert_eq!(two[1], Rule::always(Effect::Hang));
        assert_eq!("tear:any".parse::<Rule>().unwrap().to_string(), "tear:write");
    }

    #[test]
    fn a_mistake_is_named_with_what_would_be_accepted() {
        for (text, problem) in [
            ("error", "`error` is not a rule, expected one such as error:write"),
            ("fail:read", "`fail` is not an effect, expected one of error, error-path, "),
            ("error:reads", "`reads` is nothing to error, expected any or some of read, write, "),
            ("tear:read", "`read` is nothing to tear, expected any or some of write"),
            ("short:flush", "`flush` is nothing to short, "),
            ("error:read,read", "read is named twice in `read,read`, expected once"),
            ("error:read@9-3", "blocks 9-3 in `error:read@9-3`, expected the lower first"),
            ("error:read@", "`` follows `@`, expected a number"),
            ("error:read/0", "one in 0 in `error:read/0`"),
            ("error:read~0", "one in 0 in `error:read~0`"),
            ("error:readx3/2", "`/2` in `error:readx3/2` is not understood, expected @FIRST-LAST"),
            ("error:readx99999999999999999999", "`99999999999999999999` follows `x`"),
        ] {
            let refused = text.parse::<Rule>().unwrap_err();
            assert!(refused.starts_with(problem), "{text}: {refused}");
        }
    }

    #[test]
    fn counts_are_of_the_requests_that_a_rule_is_about() {
        assert_eq!(struck("error:readx3", 9), [0, 1, 2]);
        assert_eq!(struck("error:read/3", 9), [2, 5, 8]);
        assert_eq!(struck("error:read+7", 9), [7, 8]);
        assert_eq!(struck("error:read+2/3x2", 20), [4, 7]);
        assert_eq!(struck("error:write", 9), []);
        assert_eq!(struck("error:readx2;hang:readx2", 9), [0, 1, 2, 3]);
        let by_chance = struck("error:read~10", 10_000);
        assert!((850..1_150).contains(&by_chance.len()), "{}", by_chance.len());
        assert_eq!(by_chance, struck("error:read~10", 10_000), "by the seed");
    }

    #[test]
    fn blocks_are_touched_by_overlap() {
        let rules = Rules::new(Rule::parse_all("error:any@10-11").unwrap(), 5);
        let strikes = |operation, lba| rules.strike(&request(operation, lba)).is_some();
        for lba in 0..20 {
            assert_eq!(strikes(Operation::Write, lba), (7..=11).contains(&lba), "{lba}");
        }
        assert!(!strikes(Operation::Flush, 10), "a flush touches no blocks");
        let copy = Request { operand: 9, ..request(Operation::Copy, 50) };
        assert!(rules.strike(&copy).is_some(), "a copy touches its source too");
    }

    #[test]
    fn what_is_not_taken_is_not_counted() {
        let mut rules = Rules::new(Rule::parse_all("error:readx1").unwrap(), 5);
        let read = request(Operation::Read, 0);
        for _ in 0..3 {
            assert!(rules.strike(&read).is_some());
        }
        let strike = rules.strike(&read);
        rules.taken(&read, strike.as_ref());
        assert!(rules.strike(&read).is_none());
        assert_eq!(rules.as_list()[0].1, 1);
    }
}
