//! Work of a variant.

use tenmil_base::text::quote_shell_word;
use tenmil_linux::CpuList;

use super::test_bench::veth_pair;

/// Work of a variant. The words may contain `{first}`, `{last}` and `{all}` for cores that this
/// process may use, `{count}` for their number, and `{target}` for the URI of the target.
#[derive(Clone, Copy, Debug)]
pub enum BenchTask {
    /// `tenmil perf` with these arguments, in this process.
    Perf(&'static str),
    /// Several runs of `tenmil perf` one after the other: a load that rises and falls.
    Phases(&'static [&'static str]),
    /// `tenmil serve` in a separate process, and `tenmil perf` on it.
    Served {
        /// Arguments of `serve`.
        serve: &'static str,
        /// Arguments of `perf`.
        perf: &'static str,
    },
    /// Like `Served`, with the target behind a pair of veth interfaces.
    OverVeth {
        /// Arguments of `serve`.
        serve: &'static str,
        /// Arguments of `perf`.
        perf: &'static str,
    },
    /// A target on loopback under 16 readers of 4 KiB and writes of 1
    /// MiB.
    Mixed {
        /// Options of `serve`.
        serve: &'static str,
        /// Options of the target's URI.
        keys: &'static str,
    },
    /// A loop.
    Loop {
        /// Path of its source.
        source: &'static str,
        /// The loop.
        run: BenchLoopFn,
    },
    /// `fio` with these arguments.
    Fio(&'static str),
    /// `tenmil perf` of a program with this build variant.
    Built {
        /// Name of the build variant.
        variant: &'static str,
        /// Arguments of `perf`.
        perf: &'static str,
    },
}

/// Loop that runs while its argument returns true, and returns the number of operations.
pub(crate) type BenchLoopFn = fn(&mut dyn FnMut() -> bool) -> u64;

/// NQN of the targets.
pub(crate) const NQN: &str = "nqn.2026-01.org.tenmil:disk";

impl BenchTask {
    /// Command lines that repeat the work, with the target at the default port, for trials of `seconds`.
    pub fn command_lines(&self, cores: &CpuList, seconds: f64) -> Vec<String> {
        let (far, runner) = veth_pair::TYPED;
        let host = if matches!(self, Self::OverVeth { .. }) { far } else { "127.0.0.1" };
        let typed = |words: &str| {
            let target = format!("tcp://{host}:4420/{NQN}");
            expand_placeholders(words, cores, &target)
                .unwrap_or_else(|_| vec![words.to_owned()])
                .iter()
                .map(|word| quote_shell_word(word))
                .collect::<Vec<_>>()
                .join(" ")
        };
        let perf = |words: &str| format!("tenmil perf {} -t {seconds}", typed(words));
        let serve = |words: &str| {
            format!("tenmil serve 'null:?size=1g' -l tcp://{host}:4420 {}", typed(words))
        };
        match *self {
            Self::Perf(words) => vec![perf(words)],
            Self::Phases(phases) => phases.iter().map(|words| perf(words)).collect(),
            Self::Served { serve: serving, perf: words } => vec![serve(serving), perf(words)],
            Self::OverVeth { serve: serving, perf: words } => {
                let serving = format!("{runner} {} --allow-any-host", serve(serving));
                veth_pair::manual_creation_commands()
                    .into_iter()
                    .chain([serving, perf(words)])
                    .collect()
            }
            Self::Mixed { serve: serving, keys } => vec![
                serve(serving),
                format!(
                    "cargo run --release --example mixed -- 'tcp://127.0.0.1:4420/{NQN}{keys}' 5"
                ),
            ],
            Self::Loop { source, .. } => vec![format!("a loop of its own: {source}")],
            Self::Fio(words) => vec![format!("fio {}", typed(words))],
            Self::Built { variant, perf: words } => {
                vec![format!("target/pgo/{variant}/{}", perf(words))]
            }
        }
    }
}

/// Splits `words` and replaces the placeholders, or returns what the machine lacks.
pub fn expand_placeholders(
    words: &str,
    cores: &CpuList,
    target: &str,
) -> Result<Vec<String>, String> {
    let (first, last) = (cores.iter().next(), cores.iter().last());
    let (Some(first), Some(last)) = (first, last) else {
        return Err("no processor may be used, expected at least one".to_owned());
    };
    if cores.len() < 2 && ["{all}", "{last}"].iter().any(|asked| words.contains(asked)) {
        return Err(
            "one processor may be used, expected two for two threads that run at once".into()
        );
    }
    let put = |word: &str| {
        word.replace("{first}", &first.to_string())
            .replace("{last}", &last.to_string())
            .replace("{all}", &cores.to_string())
            .replace("{count}", &cores.len().to_string())
            .replace("{target}", target)
    };
    Ok(words.split_whitespace().map(put).collect())
}

#[cfg(test)]
mod tests {
    use tenmil_linux::CpuList;

    use super::{BenchTask, expand_placeholders};

    #[test]
    fn placeholders_are_replaced_by_cores_and_target() {
        let cores = CpuList::parse("1-3").unwrap();
        let words = expand_placeholders(
            "{target}?msg-more=no -c {all} -P {count} {first}{last}",
            &cores,
            "tcp://x",
        );
        assert_eq!(words.unwrap(), ["tcp://x?msg-more=no", "-c", "1-3", "-P", "3", "13"]);
        let one = CpuList::parse("5").unwrap();
        assert_eq!(expand_placeholders("-c {first}", &one, "").unwrap(), ["-c", "5"]);
        let refused = expand_placeholders("-c {all}", &one, "").unwrap_err();
        assert!(refused.contains("expected two"), "{refused}");
    }

    #[test]
    fn variant_command_lines_can_be_typed_by_hand() {
        let cores = CpuList::parse("0-1").unwrap();
        let served =
            BenchTask::Served { serve: "--cores {last}", perf: "{target}?msg-more=no -c {first}" };
        assert_eq!(
            served.command_lines(&cores, 1.5),
            [
                "tenmil serve 'null:?size=1g' -l tcp://127.0.0.1:4420 --cores 1",
                "tenmil perf 'tcp://127.0.0.1:4420/nqn.2026-01.org.tenmil:disk?msg-more=no' -c 0 -t 1.5",
            ]
        );
    }
}
