//! What a side runs.

use host::Cores;

use super::bench::wire;

/// What a side runs. Words may name `{first}`, `{last}` and `{all}` cores that this process may use,
/// their `{count}`, and the `{target}` that serves.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Work {
    /// `tenmil perf` with these words, in this process.
    Perf(&'static str),
    /// The same with other words again and again: a load that rises and falls.
    Phases(&'static [&'static str]),
    /// `tenmil serve` with the one in a process of its own, and `tenmil perf` with the other.
    Served { serve: &'static str, perf: &'static str },
    /// The same, the target at the other end of a wire.
    Wired { serve: &'static str, perf: &'static str },
    /// The same target on loopback; 16 readers of 4 KiB beside writes of 1 MiB, with these keys of its name.
    Mixed { serve: &'static str, keys: &'static str },
    /// A loop, and where its source is.
    Loop { source: &'static str, run: Loop },
    /// `fio` with these words.
    Fio(&'static str),
    /// `tenmil perf` with these words of a program that was built in this way.
    Built { way: &'static str, perf: &'static str },
}

/// Goes on for as long as it is told to, and says how many it has done.
pub(crate) type Loop = fn(&mut dyn FnMut() -> bool) -> u64;

/// What a target that is served here is called.
pub(crate) const NQN: &str = "nqn.2026-01.org.tenmil:disk";

impl Work {
    /// How it can be typed, the target at the usual port, for turns of `seconds`.
    pub(crate) fn commands(&self, cores: &Cores, seconds: f64) -> Vec<String> {
        let (far, runner) = wire::TYPED;
        let host = if matches!(self, Self::Wired { .. }) { far } else { "127.0.0.1" };
        let typed = |words: &str| {
            let target = format!("tcp://{host}:4420/{NQN}");
            words_of(words, cores, &target)
                .unwrap_or_else(|_| vec![words.to_owned()])
                .iter()
                .map(|word| quoted(word))
                .collect::<Vec<_>>()
                .join(" ")
        };
        let perf = |words: &str| format!("tenmil perf {} -t {seconds}", typed(words));
        let serve = |words: &str| {
            format!("tenmil serve null:?size=1g -l tcp://{host}:4420 {}", typed(words))
        };
        match *self {
            Self::Perf(words) => vec![perf(words)],
            Self::Phases(phases) => phases.iter().map(|words| perf(words)).collect(),
            Self::Served { serve: serving, perf: words } => vec![serve(serving), perf(words)],
            Self::Wired { serve: serving, perf: words } => {
                let serving = format!("{runner} {} --allow-any-host", serve(serving));
                wire::typed().into_iter().chain([serving, perf(words)]).collect()
            }
            Self::Mixed { serve: serving, keys } => vec![
                serve(serving),
                format!(
                    "cargo run --release --example mixed -- 'tcp://127.0.0.1:4420/{NQN}{keys}' 5"
                ),
            ],
            Self::Loop { source, .. } => vec![format!("a loop of its own: {source}")],
            Self::Fio(words) => vec![format!("fio {}", typed(words))],
            Self::Built { way, perf: words } => {
                vec![format!("target/pgo/{way}/{}", perf(words))]
            }
        }
    }
}

/// `words` apart, with the cores and the target in their places; or what the machine lacks.
pub(crate) fn words_of(words: &str, cores: &Cores, target: &str) -> Result<Vec<String>, String> {
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

/// A word as a shell reads it.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_=:,./+@%".contains(c);
    if word.chars().all(plain) { word.to_owned() } else { format!("'{word}'") }
}

#[cfg(test)]
mod tests {
    use host::Cores;

    use super::{Work, words_of};

    #[test]
    fn cores_and_targets_take_their_places() {
        let cores = Cores::parse("1-3").unwrap();
        let words =
            words_of("{target}?more=no -c {all} -P {count} {first}{last}", &cores, "tcp://x");
        assert_eq!(words.unwrap(), ["tcp://x?more=no", "-c", "1-3", "-P", "3", "13"]);
        let one = Cores::parse("5").unwrap();
        assert_eq!(words_of("-c {first}", &one, "").unwrap(), ["-c", "5"]);
        let refused = words_of("-c {all}", &one, "").unwrap_err();
        assert!(refused.contains("expected two"), "{refused}");
    }

    #[test]
    fn a_side_can_be_typed_again() {
        let cores = Cores::parse("0-1").unwrap();
        let served = Work::Served { serve: "--cores {last}", perf: "{target}?more=no -c {first}" };
        assert_eq!(
            served.commands(&cores, 1.5),
            [
                "tenmil serve null:?size=1g -l tcp://127.0.0.1:4420 --cores 1",
                "tenmil perf 'tcp://127.0.0.1:4420/nqn.2026-01.org.tenmil:disk?more=no' -c 0 -t 1.5",
            ]
        );
    }
}
