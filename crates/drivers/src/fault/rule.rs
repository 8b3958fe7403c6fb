//! Fault rules and their text form.
//!
//! ```text
//!   rules      = rule *( ";" rule )
//!   rule       = effect ":" operations [ "@" first [ "-" last ] ] [ "+" skip ]
//!                [ "/" every | "~" chance ] [ "x" times ]
//!   effect     = error | error-path | error-internal | error-full | error-aborted
//!              | hang | drop | corrupt | tear | short
//!   operations = any | operation *( "," operation )
//!
//!   error:write@0-1023x3       the first three writes that overlap blocks 0 to 1023
//!   hang:any+100               everything after the first hundred requests
//!   corrupt:read,write/10      every tenth read or write
//!   tear:write~50x1            one write, each with a probability of 1 in 50
//! ```
//!
//! Rules are checked in order, and the first that matches is applied. `first` and `last` are LBAs. A
//! request without blocks, such as a flush, overlaps no range.

use std::fmt;
use std::str::FromStr;

use tenmil_base::{IoStatus, Operation, Random, Request};

/// A fault rule: the effect and the requests that it applies to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FaultRule {
    /// The injected fault.
    pub effect: FaultEffect,
    /// Operations that it applies to.
    pub operations: Vec<Operation>,
    /// Restricts the rule to requests that overlap these blocks, first to last.
    pub blocks: Option<(u64, u64)>,
    /// Number of matching requests to skip at first.
    pub skip: u64,
    /// Which of the others it applies to.
    pub when: FaultTrigger,
    /// Maximum number of applications.
    pub times: u64,
}

/// The fault injected into a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultEffect {
    /// Completes with an error without being executed: with this status, or by default that of a failed
    /// device.
    Error(Option<IoStatus>),
    /// Is executed, but its completion is held until it is released by the control.
    Hang,
    /// Is neither executed nor completed. Its slot is lost for the lifetime of the channel.
    Drop,
    /// One to three bits of its data are flipped: of the data that a read returns or a write stores. It
    /// succeeds.
    Corrupt,
    /// A write stores some of its first blocks, and fails.
    TornWrite,
    /// Is executed for some of its first blocks only, and succeeds.
    Short,
}

/// Selects the requests that a rule applies to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultTrigger {
    /// Every n-th request.
    Every(u64),
    /// One in n requests, at random.
    Chance(u64),
}

/// Fault rules with their counters.
#[derive(Clone, Debug)]
pub(super) struct FaultRules {
    rules: Vec<(FaultRule, RuleCounters)>,
    seed: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct RuleCounters {
    /// Requests checked against the rule that it is about.
    seen: u64,
    struck: u64,
}

/// The effect on a request, to be counted once the request is accepted.
#[derive(Clone, Debug)]
pub(super) struct MatchedRule {
    pub(super) effect: FaultEffect,
    /// Random stream for the details of the effect.
    pub(super) random: Random,
    /// Index of the rule.
    rule: usize,
}

const EFFECTS: [(&str, FaultEffect); 10] = [
    ("error", FaultEffect::Error(None)),
    ("error-path", FaultEffect::Error(Some(IoStatus::PATH_ERROR))),
    ("error-internal", FaultEffect::Error(Some(IoStatus::INTERNAL_ERROR))),
    ("error-full", FaultEffect::Error(Some(IoStatus::CAPACITY_EXCEEDED))),
    ("error-aborted", FaultEffect::Error(Some(IoStatus::ABORTED))),
    ("hang", FaultEffect::Hang),
    ("drop", FaultEffect::Drop),
    ("corrupt", FaultEffect::Corrupt),
    ("tear", FaultEffect::TornWrite),
    ("short", FaultEffect::Short),
];

impl FaultEffect {
    fn name(self) -> &'static str {
        EFFECTS.iter().find(|(_, effect)| *effect == self).map_or("error", |(name, _)| name)
    }

    /// Whether the effect is possible for this operation.
    fn applies_to(self, operation: Operation) -> bool {
        match self {
            Self::Error(_) | Self::Hang | Self::Drop => true,
            Self::Corrupt => matches!(operation, Operation::Read | Operation::Write),
            Self::TornWrite => operation == Operation::Write,
            Self::Short => !matches!(operation, Operation::Flush | Operation::CompareAndWrite),
        }
    }

    fn applicable_operations(self) -> Vec<Operation> {
        Operation::ALL.into_iter().filter(|operation| self.applies_to(*operation)).collect()
    }
}

impl FaultRule {
    /// A rule with this effect on every operation it is possible for.
    pub fn for_every_request(effect: FaultEffect) -> Self {
        let (blocks, skip, when, times) = (None, 0, FaultTrigger::Every(1), u64::MAX);
        Self { effect, operations: effect.applicable_operations(), blocks, skip, when, times }
    }

    /// Parses several rules. An empty text has no rules.
    ///
    /// # Errors
    ///
    /// Which rule is invalid, and what is expected.
    pub fn parse_all(text: &str) -> Result<Vec<Self>, String> {
        text.split(';').filter(|rule| !rule.is_empty()).map(str::parse).collect()
    }

    fn matches(&self, request: &Request) -> bool {
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

impl FaultRules {
    pub(super) fn new(rules: Vec<FaultRule>, seed: u64) -> Self {
        let rules = rules.into_iter().map(|rule| (rule, RuleCounters::default())).collect();
        Self { rules, seed }
    }

    pub(super) fn rules_with_counts(&self) -> Vec<(FaultRule, u64)> {
        self.rules.iter().map(|(rule, record)| (rule.clone(), record.struck)).collect()
    }

    /// The rule that applies to a request, if any. Nothing is counted before [`count_accepted`](Self::count_accepted).
    pub(super) fn rule_for_request(&self, request: &Request) -> Option<MatchedRule> {
        self.rules.iter().enumerate().find_map(|(index, (rule, record))| {
            if !rule.matches(request) || record.struck >= rule.times || record.seen < rule.skip {
                return None;
            }
            // One random stream per request and rule, so that a repeated query has the same result.
            let mut random = Random::new(self.seed ^ (index as u64) << 48 ^ record.seen);
            let strikes = match rule.when {
                FaultTrigger::Every(every) => (record.seen - rule.skip + 1).is_multiple_of(every),
                FaultTrigger::Chance(chance) => random.chance(1, chance),
            };
            strikes.then_some(MatchedRule { effect: rule.effect, random, rule: index })
        })
    }

    /// Counts an accepted request and the rule applied to it.
    pub(super) fn count_accepted(&mut self, request: &Request, strike: Option<&MatchedRule>) {
        let last = strike.map_or(usize::MAX, |strike| strike.rule);
        for (index, (rule, record)) in self.rules.iter_mut().enumerate() {
            if index <= last && rule.matches(request) {
                record.seen += 1;
                record.struck += u64::from(index == last);
            }
        }
    }
}

impl FromStr for FaultRule {
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
        let mut rule = Self {
            operations: parse_operations(effect, operations)?,
            ..Self::for_every_request(effect)
        };
        if let Some(first) = take_number(&mut rest, '@')? {
            let last = take_number(&mut rest, '-')?.unwrap_or(first);
            if last < first {
                return Err(format!("blocks {first}-{last} in `{text}`, expected the lower first"));
            }
            rule.blocks = Some((first, last));
        }
        rule.skip = take_number(&mut rest, '+')?.unwrap_or(0);
        if let Some(every) = take_number(&mut rest, '/')? {
            rule.when = FaultTrigger::Every(every);
        } else if let Some(chance) = take_number(&mut rest, '~')? {
            rule.when = FaultTrigger::Chance(chance);
        }
        if matches!(rule.when, FaultTrigger::Every(0) | FaultTrigger::Chance(0)) {
            return Err(format!("one in 0 in `{text}`, expected at least one in 1"));
        }
        rule.times = take_number(&mut rest, 'x')?.unwrap_or(u64::MAX);
        if rest.is_empty() { Ok(rule) } else { Err(unparsed_rest_error(text, rest)) }
    }
}

fn unparsed_rest_error(text: &str, rest: &str) -> String {
    format!(
        "`{rest}` in `{text}` is not understood, expected @FIRST-LAST, +SKIP, /EVERY or ~CHANCE, \
         xTIMES in this order"
    )
}

fn parse_operations(effect: FaultEffect, text: &str) -> Result<Vec<Operation>, String> {
    if text == "any" {
        return Ok(effect.applicable_operations());
    }
    let mut operations = Vec::new();
    for name in text.split(',') {
        let found =
            effect.applicable_operations().into_iter().find(|operation| operation.name() == name);
        let operation = found.ok_or_else(|| {
            let names: Vec<&str> =
                effect.applicable_operations().iter().map(|one| one.name()).collect();
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

/// Parses a mark and the number after it off the front, if the mark is there.
fn take_number(rest: &mut &str, mark: char) -> Result<Option<u64>, String> {
    let Some(after) = rest.strip_prefix(mark) else { return Ok(None) };
    let end = after.bytes().position(|byte| !byte.is_ascii_digit()).unwrap_or(after.len());
    let (digits, left) = after.split_at(end);
    let number = digits
        .parse()
        .map_err(|_| format!("`{digits}` follows `{mark}`, expected a number below 2^64"))?;
    *rest = left;
    Ok(Some(number))
}

impl fmt::Display for FaultRule {
    /// Writes a text that parses to the same rule.
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { effect, operations, blocks, skip, when, times } = self;
        write!(out, "{}:", effect.name())?;
        if *operations == effect.applicable_operations() && operations.len() > 1 {
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
            FaultTrigger::Every(1) => {}
            FaultTrigger::Every(every) => write!(out, "/{every}")?,
            FaultTrigger::Chance(chance) => write!(out, "~{chance}")?,
        }
        if *times < u64::MAX { write!(out, "x{times}") } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::{Operation, Request, RequestFlags};

    use super::{FaultEffect, FaultRule, FaultRules};

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
            flags: RequestFlags::NONE,
        }
    }

    /// Which of `count` reads the rule applies to.
    fn indexes_of_matched_reads(rule: &str, count: usize) -> Vec<usize> {
        let mut rules = FaultRules::new(FaultRule::parse_all(rule).unwrap(), 5);
        let request = request(Operation::Read, 0);
        let one = |_: &usize| {
            let strike = rules.rule_for_request(&request);
            rules.count_accepted(&request, strike.as_ref());
            strike.is_some()
        };
        (0..count).filter(one).collect()
    }

    #[test]
    fn fault_rule_text_round_trips() {
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
            assert_eq!(text.parse::<FaultRule>().unwrap().to_string(), text);
        }
        let two = FaultRule::parse_all("error:read;;hang:any;").unwrap();
        assert_eq!(two.len(), 2);
        assert_eq!(two[1], FaultRule::for_every_request(FaultEffect::Hang));
        assert_eq!("tear:any".parse::<FaultRule>().unwrap().to_string(), "tear:write");
    }

    #[test]
    fn invalid_fault_rule_is_rejected_with_the_accepted_form() {
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
            let refused = text.parse::<FaultRule>().unwrap_err();
            assert!(refused.starts_with(problem), "{text}: {refused}");
        }
    }

    #[test]
    fn rule_counters_count_matching_requests_only() {
        assert_eq!(indexes_of_matched_reads("error:readx3", 9), [0, 1, 2]);
        assert_eq!(indexes_of_matched_reads("error:read/3", 9), [2, 5, 8]);
        assert_eq!(indexes_of_matched_reads("error:read+7", 9), [7, 8]);
        assert_eq!(indexes_of_matched_reads("error:read+2/3x2", 20), [4, 7]);
        assert_eq!(indexes_of_matched_reads("error:write", 9), []);
        assert_eq!(indexes_of_matched_reads("error:readx2;hang:readx2", 9), [0, 1, 2, 3]);
        let by_chance = indexes_of_matched_reads("error:read~10", 10_000);
        assert!((850..1_150).contains(&by_chance.len()), "{}", by_chance.len());
        assert_eq!(by_chance, indexes_of_matched_reads("error:read~10", 10_000), "by the seed");
    }

    #[test]
    fn rule_matches_overlapping_blocks() {
        let rules = FaultRules::new(FaultRule::parse_all("error:any@10-11").unwrap(), 5);
        let strikes = |operation, lba| rules.rule_for_request(&request(operation, lba)).is_some();
        for lba in 0..20 {
            assert_eq!(strikes(Operation::Write, lba), (7..=11).contains(&lba), "{lba}");
        }
        assert!(!strikes(Operation::Flush, 10), "a flush touches no blocks");
        let copy = Request { operand: 9, ..request(Operation::Copy, 50) };
        assert!(rules.rule_for_request(&copy).is_some(), "a copy touches its source too");
    }

    #[test]
    fn unaccepted_requests_are_not_counted() {
        let mut rules = FaultRules::new(FaultRule::parse_all("error:readx1").unwrap(), 5);
        let read = request(Operation::Read, 0);
        for _ in 0..3 {
            assert!(rules.rule_for_request(&read).is_some());
        }
        let strike = rules.rule_for_request(&read);
        rules.count_accepted(&read, strike.as_ref());
        assert!(rules.rule_for_request(&read).is_none());
        assert_eq!(rules.rules_with_counts()[0].1, 1);
    }
}
