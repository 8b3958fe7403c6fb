//! Seccomp filter as a classic BPF program (seccomp(2), `linux/filter.h`).
//!
//! ```text
//!   architecture ≠ native ──────────────▶ kill the process
//!   frequent calls, one comparison each ─▶ allow
//!   binary search over the ranges of call numbers:
//!       allow │ check of arguments │ deny with an error │ report │ kill
//! ```
//!
//! Since Linux 5.11 the kernel remembers which numbers are allowed whatever their arguments, and does
//! not run the program for them; the order matters on older kernels and for calls with a check.

use libc::sock_filter;

/// Result of a filter: one of the kernel's SECCOMP_RET_* values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FilterAction {
    /// The call runs.
    Allow,
    /// The call fails with this error number and is not reported.
    Fail(u16),
    /// The thread receives SIGSYS; the handler counts the call and makes it fail with EPERM.
    Trap,
    /// The call runs, and the kernel logs it.
    Log,
    /// The process ends with SIGSYS.
    Kill,
}

/// Condition on an argument: its bits under `mask` are one of `values`.
#[derive(Clone, Debug)]
pub(super) struct ArgumentCondition {
    /// Index of the argument, 0 to 5.
    pub(super) argument: u8,
    /// Bits that are compared; the kernel ignores the upper half of arguments of type `int`.
    pub(super) mask: u64,
    /// Accepted values.
    pub(super) values: Vec<u32>,
}

/// What becomes of a call number.
#[derive(Clone, Debug)]
pub(super) enum FilterVerdict {
    /// The same for all arguments.
    Always(FilterAction),
    /// Allowed if all conditions of one of the alternatives hold.
    Check {
        /// Alternatives, each a list of conditions.
        alternatives: Vec<Vec<ArgumentCondition>>,
        /// The action if none holds.
        otherwise: FilterAction,
    },
}

/// Rules of a filter.
#[derive(Clone, Debug)]
pub(super) struct FilterRules {
    /// Calls that are compared first; they are allowed.
    pub(super) frequent: Vec<u32>,
    /// Verdicts by call number; a number occurs once.
    pub(super) verdicts: Vec<(u32, FilterVerdict)>,
    /// Action for a number without a verdict, up to [`NUMBER_LAST`].
    pub(super) otherwise: FilterAction,
    /// Action for calls of another architecture, and of the x32 interface.
    pub(super) foreign: FilterAction,
}

/// Highest number of a system call of Linux 6.18, the same on all architectures. Greater ones fail with
/// ENOSYS, upon which a C library tries the older call; EPERM would make it fail.
pub(super) const NUMBER_LAST: u32 = 469;
/// Numbers from here on belong to the x32 interface of x86_64 (`__X32_SYSCALL_BIT`).
const NUMBER_X32: u32 = 0x4000_0000;

/// Native architecture as the filter sees it: AUDIT_ARCH_X86_64 or AUDIT_ARCH_AARCH64
/// (`linux/audit.h`).
#[cfg(target_arch = "x86_64")]
pub(super) const ARCHITECTURE: Option<u32> = Some(0xc000_003e);
#[cfg(target_arch = "aarch64")]
pub(super) const ARCHITECTURE: Option<u32> = Some(0xc000_00b7);
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
pub(super) const ARCHITECTURE: Option<u32> = None;

// Offsets in `struct seccomp_data` (`linux/seccomp.h`); both architectures are little-endian.
const OFFSET_NUMBER: u32 = 0;
const OFFSET_ARCHITECTURE: u32 = 4;
const OFFSET_ARGUMENTS: u32 = 16;

// Instruction codes (`linux/bpf_common.h`).
const LOAD_WORD: u16 = 0x20;
const AND: u16 = 0x54;
const JUMP: u16 = 0x05;
const JUMP_IF_EQUAL: u16 = 0x15;
const JUMP_IF_GREATER_OR_EQUAL: u16 = 0x35;
const RETURN: u16 = 0x06;

/// One range of call numbers in the binary search: from `first` to the next one.
struct NumberRange<'a> {
    first: u32,
    verdict: &'a FilterVerdict,
}

impl FilterAction {
    /// Value that the program returns (`SECCOMP_RET_*`).
    pub(super) const fn return_value(self) -> u32 {
        match self {
            Self::Allow => libc::SECCOMP_RET_ALLOW,
            Self::Fail(errno) => libc::SECCOMP_RET_ERRNO | errno as u32,
            Self::Trap => libc::SECCOMP_RET_TRAP,
            Self::Log => libc::SECCOMP_RET_LOG,
            Self::Kill => libc::SECCOMP_RET_KILL_PROCESS,
        }
    }
}

/// The program of these rules for an architecture (AUDIT_ARCH_*).
pub(super) fn filter_program(rules: &FilterRules, architecture: u32) -> Vec<sock_filter> {
    let mut program = vec![
        instruction(LOAD_WORD, OFFSET_ARCHITECTURE),
        branch(JUMP_IF_EQUAL, architecture, 1, 0),
        returns(rules.foreign),
        instruction(LOAD_WORD, OFFSET_NUMBER),
    ];
    for number in &rules.frequent {
        program.push(branch(JUMP_IF_EQUAL, *number, 0, 1));
        program.push(returns(FilterAction::Allow));
    }
    let otherwise = FilterVerdict::Always(rules.otherwise);
    let unknown = FilterVerdict::Always(FilterAction::Fail(ENOSYS));
    let x32 = FilterVerdict::Always(rules.foreign);
    program.extend(search(&number_ranges(rules, [&otherwise, &unknown, &x32])));
    program
}

#[expect(clippy::cast_possible_truncation, reason = "an error number is below 4096")]
const ENOSYS: u16 = libc::ENOSYS as u16;

/// All numbers as ranges, ascending, the first from 0; adjacent ranges differ.
fn number_ranges<'a>(
    rules: &'a FilterRules,
    [otherwise, unknown, x32]: [&'a FilterVerdict; 3],
) -> Vec<NumberRange<'a>> {
    let mut ranges: Vec<NumberRange<'a>> = Vec::new();
    let mut add = |first, verdict: &'a FilterVerdict| match ranges.last() {
        Some(last) if is_same_action(last.verdict, verdict) => {}
        _ => ranges.push(NumberRange { first, verdict }),
    };
    let mut sorted: Vec<_> = rules.verdicts.iter().collect();
    sorted.sort_unstable_by_key(|(number, _)| *number);
    let mut next = 0;
    for (number, verdict) in sorted {
        if *number > next {
            add(next, otherwise);
        }
        add(*number, verdict);
        next = number + 1;
    }
    if next <= NUMBER_LAST {
        add(next, otherwise);
    }
    add(NUMBER_LAST.max(next.saturating_sub(1)) + 1, unknown);
    add(NUMBER_X32, x32);
    ranges
}

fn is_same_action(one: &FilterVerdict, other: &FilterVerdict) -> bool {
    matches!((one, other), (FilterVerdict::Always(one), FilterVerdict::Always(other)) if one == other)
}

/// Binary search over the ranges; the call number is in the accumulator.
fn search(ranges: &[NumberRange<'_>]) -> Vec<sock_filter> {
    let middle = ranges.len() / 2;
    let (below, above) = match ranges {
        [] => return Vec::new(),
        [one] => return verdict_program(one.verdict),
        _ => ranges.split_at(middle),
    };
    let (lower, upper) = (search(below), search(above));
    // Conditional jumps reach 255 instructions only, so the far one is unconditional.
    let skipped = u32::try_from(lower.len()).unwrap_or(u32::MAX);
    let mut program =
        vec![branch(JUMP_IF_GREATER_OR_EQUAL, above[0].first, 0, 1), instruction(JUMP, skipped)];
    program.extend(lower);
    program.extend(upper);
    program
}

fn verdict_program(verdict: &FilterVerdict) -> Vec<sock_filter> {
    match verdict {
        FilterVerdict::Always(action) => vec![returns(*action)],
        FilterVerdict::Check { alternatives, otherwise } => {
            let mut program: Vec<_> =
                alternatives.iter().flat_map(|all| alternative_program(all)).collect();
            program.push(returns(*otherwise));
            program
        }
    }
}

/// Returns `Allow` if all conditions hold, and continues behind itself otherwise.
fn alternative_program(conditions: &[ArgumentCondition]) -> Vec<sock_filter> {
    // Built from the end, so that the distance to the end is known.
    let mut program = vec![returns(FilterAction::Allow)];
    for condition in conditions.iter().rev() {
        let mut part = condition_program(condition, distance(program.len()));
        part.append(&mut program);
        program = part;
    }
    program
}

/// Continues behind itself if the condition holds, and skips `rest` more instructions otherwise.
fn condition_program(condition: &ArgumentCondition, rest: u8) -> Vec<sock_filter> {
    let ArgumentCondition { argument, mask, values } = condition;
    let offset = OFFSET_ARGUMENTS + 8 * u32::from(*argument);
    let (lower, upper) = (low_half(*mask), low_half(*mask >> 32));
    let mut program = Vec::new();
    let count = values.len();
    let compare = |at: usize, value: u32| {
        let after = distance(count - 1 - at);
        // The last comparison decides that the condition does not hold.
        let fails = if after == 0 { rest } else { 0 };
        branch(JUMP_IF_EQUAL, value, after, fails)
    };
    let compares = values.iter().enumerate().map(|(at, value)| compare(at, *value));
    if upper != 0 {
        // The accepted values have 32 bits.
        let skipped = rest + distance(count) + if lower == u32::MAX { 1 } else { 2 };
        program.push(instruction(LOAD_WORD, offset + 4));
        program.push(instruction(AND, upper));
        program.push(branch(JUMP_IF_EQUAL, 0, 0, skipped));
    }
    program.push(instruction(LOAD_WORD, offset));
    if lower != u32::MAX {
        program.push(instruction(AND, lower));
    }
    program.extend(compares);
    program
}

/// A jump distance. Conditions are constants of this crate, and a test compiles all of them.
fn distance(instructions: usize) -> u8 {
    u8::try_from(instructions).unwrap_or(u8::MAX)
}

#[expect(clippy::cast_possible_truncation, reason = "the lower half is meant")]
const fn low_half(bits: u64) -> u32 {
    bits as u32
}

const fn instruction(code: u16, k: u32) -> sock_filter {
    sock_filter { code, jt: 0, jf: 0, k }
}

const fn branch(code: u16, k: u32, jt: u8, jf: u8) -> sock_filter {
    sock_filter { code, jt, jf, k }
}

const fn returns(action: FilterAction) -> sock_filter {
    instruction(RETURN, action.return_value())
}

#[cfg(test)]
pub(super) mod tests {
    use libc::sock_filter;

    use super::{
        AND, ARCHITECTURE, ArgumentCondition, FilterAction, FilterRules, FilterVerdict, JUMP,
        JUMP_IF_EQUAL, JUMP_IF_GREATER_OR_EQUAL, LOAD_WORD, NUMBER_LAST, RETURN, filter_program,
    };

    /// Runs a program as the kernel does (Documentation/networking/filter.rst).
    pub(in super::super) fn run_program(
        program: &[sock_filter],
        architecture: u32,
        number: u32,
        arguments: [u64; 6],
    ) -> u32 {
        let mut data = Vec::new();
        data.extend(number.to_le_bytes());
        data.extend(architecture.to_le_bytes());
        data.extend([0; 8]);
        arguments.iter().for_each(|argument| data.extend(argument.to_le_bytes()));
        let (mut accumulator, mut at) = (0_u32, 0_usize);
        loop {
            let sock_filter { code, jt, jf, k } = program[at];
            at += 1;
            let mut jump_if = |condition| at += usize::from(if condition { jt } else { jf });
            match code {
                LOAD_WORD => {
                    let from = k as usize;
                    assert_eq!(from % 4, 0, "the kernel accepts aligned words only");
                    let word = data[from..from + 4].try_into().unwrap();
                    accumulator = u32::from_le_bytes(word);
                }
                AND => accumulator &= k,
                JUMP => at += k as usize,
                JUMP_IF_EQUAL => jump_if(accumulator == k),
                JUMP_IF_GREATER_OR_EQUAL => jump_if(accumulator >= k),
                RETURN => return k,
                code => panic!("instruction {code:#x}"),
            }
        }
    }

    /// What the rules mean, without a program.
    fn meaning(rules: &FilterRules, number: u32, arguments: [u64; 6]) -> FilterAction {
        if rules.frequent.contains(&number) {
            return FilterAction::Allow;
        }
        let holds = |one: &ArgumentCondition| {
            let found = arguments[usize::from(one.argument)] & one.mask;
            one.values.iter().any(|value| u64::from(*value) == found)
        };
        match rules.verdicts.iter().find(|(of, _)| *of == number).map(|(_, verdict)| verdict) {
            Some(FilterVerdict::Always(action)) => *action,
            Some(FilterVerdict::Check { alternatives, otherwise }) => {
                match alternatives.iter().any(|all| all.iter().all(holds)) {
                    true => FilterAction::Allow,
                    false => *otherwise,
                }
            }
            None if number >= 0x4000_0000 => rules.foreign,
            None if number > NUMBER_LAST => FilterAction::Fail(38),
            None => rules.otherwise,
        }
    }

    /// Compares a program with the meaning of its rules for every number and these arguments.
    pub(in super::super) fn check_program(rules: &FilterRules, values: &[u64]) {
        let architecture = ARCHITECTURE.unwrap_or(0xc000_003e);
        let program = filter_program(rules, architecture);
        assert!(program.len() <= 4096, "BPF_MAXINSNS");
        let numbers = (0..600).chain([0x3fff_ffff, 0x4000_0000, 0x4000_0001, u32::MAX]);
        for number in numbers {
            for first in values {
                for third in values {
                    let arguments = [*first, *third, *third, 0, 0, 0];
                    let found = run_program(&program, architecture, number, arguments);
                    let expected = meaning(rules, number, arguments).return_value();
                    assert_eq!(found, expected, "{number} {arguments:x?}");
                }
            }
        }
        for other in [0, 0x4000_0003, architecture ^ 1] {
            let found = run_program(&program, other, 0, [0; 6]);
            assert_eq!(found, rules.foreign.return_value(), "{other:x}");
        }
    }

    #[test]
    fn program_decides_as_its_rules_for_every_number_and_argument() {
        let one = |argument, mask, values: &[u32]| ArgumentCondition {
            argument,
            mask,
            values: values.to_vec(),
        };
        let check = |alternatives: &[&[ArgumentCondition]], otherwise| FilterVerdict::Check {
            alternatives: alternatives.iter().map(|all| all.to_vec()).collect(),
            otherwise,
        };
        let rules = FilterRules {
            frequent: vec![232, 46],
            verdicts: vec![
                (0, FilterVerdict::Always(FilterAction::Allow)),
                (1, FilterVerdict::Always(FilterAction::Allow)),
                (3, check(&[&[one(0, 0xffff_ffff, &[1, 2, 10])]], FilterAction::Trap)),
                (4, check(&[&[one(0, u64::MAX, &[0]), one(2, 6, &[0, 2, 4])]], FilterAction::Log)),
                (
                    5,
                    check(
                        &[&[one(1, 0xff00, &[0x1200, 0x300])], &[one(1, u64::MAX, &[0x5421])]],
                        FilterAction::Fail(1),
                    ),
                ),
                (59, FilterVerdict::Always(FilterAction::Kill)),
                (NUMBER_LAST, FilterVerdict::Always(FilterAction::Allow)),
            ],
            otherwise: FilterAction::Trap,
            foreign: FilterAction::Kill,
        };
        let values = [
            0,
            1,
            2,
            4,
            6,
            7,
            10,
            0x300,
            0x12ff,
            0x5421,
            1 << 32,
            0x1_0000_0001,
            0x1_0000_5421,
            u64::MAX,
        ];
        check_program(&rules, &values);
    }
}
