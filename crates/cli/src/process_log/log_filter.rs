//! What is logged: a level, and levels of single modules.
//!
//! ```text
//!   info                         notes, warnings and errors
//!   warn,devices=debug           of the crate tenmil_devices also details
//!   info,serve::tcp=off          nothing of this module and those in it
//! ```

use std::str::FromStr;

use tracing::level_filters::LevelFilter;

/// Levels by module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LogFilter {
    default: LevelFilter,
    /// Module path without `tenmil_`, and its level. The longest fitting path decides.
    modules: Vec<(String, LevelFilter)>,
}

/// Words for levels.
const LEVELS: [(&str, LevelFilter); 6] = [
    ("off", LevelFilter::OFF),
    ("error", LevelFilter::ERROR),
    ("warn", LevelFilter::WARN),
    ("info", LevelFilter::INFO),
    ("debug", LevelFilter::DEBUG),
    ("trace", LevelFilter::TRACE),
];
/// Beginning of the names of all crates of this workspace.
const CRATE_PREFIX: &str = "tenmil_";
const EXPECTED: &str =
    "expected off, error, warn, info, debug or trace, or such as info,devices=debug";

impl LogFilter {
    /// The filter without an option.
    pub(crate) const fn standard() -> Self {
        Self { default: LevelFilter::INFO, modules: Vec::new() }
    }

    /// Whether an event of this level and module is logged.
    pub(crate) fn admits(&self, level: tracing::Level, module: &str) -> bool {
        let module = without_prefix(module);
        let fitting = self.modules.iter().filter(|(path, _)| is_in_module(module, path));
        let longest = fitting.max_by_key(|(path, _)| path.len());
        level <= longest.map_or(self.default, |(_, level)| *level)
    }

    /// The most detailed level that any module has.
    pub(crate) fn most_detailed(&self) -> LevelFilter {
        let levels = self.modules.iter().map(|(_, level)| *level);
        levels.chain([self.default]).max().unwrap_or(self.default)
    }
}

impl FromStr for LogFilter {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut filter = Self::standard();
        for word in text.split(',').map(str::trim) {
            let (module, level) = match word.split_once('=') {
                Some((module, level)) => (Some(without_prefix(module.trim())), level.trim()),
                None => (None, word),
            };
            let known = LEVELS.iter().find(|(name, _)| name.eq_ignore_ascii_case(level));
            let Some((_, level)) = known else {
                return Err(format!("`{level}` is no level, {EXPECTED}"));
            };
            match module {
                None => filter.default = *level,
                Some("") => return Err(format!("`{word}` names no module, {EXPECTED}")),
                Some(module) => filter.modules.push((module.to_owned(), *level)),
            }
        }
        Ok(filter)
    }
}

fn without_prefix(module: &str) -> &str {
    module.strip_prefix(CRATE_PREFIX).unwrap_or(module)
}

/// Whether `module` is the module `path` or one in it.
fn is_in_module(module: &str, path: &str) -> bool {
    module.strip_prefix(path).is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
}

#[cfg(test)]
mod tests {
    use tracing::Level;
    use tracing::level_filters::LevelFilter;

    use super::LogFilter;

    fn parse(text: &str) -> LogFilter {
        text.parse().unwrap()
    }

    #[test]
    fn level_admits_what_is_at_least_as_severe() {
        let filter = parse("warn");
        assert!(filter.admits(Level::ERROR, "tenmil_cli") && filter.admits(Level::WARN, "x"));
        assert!(!filter.admits(Level::INFO, "tenmil_cli"));
        assert!(!parse("off").admits(Level::ERROR, "tenmil_cli"));
        assert_eq!(parse("INFO"), LogFilter::standard());
    }

    #[test]
    fn longest_module_path_decides() {
        let filter = parse("warn, devices=debug, tenmil_devices::tcp=off");
        assert!(filter.admits(Level::DEBUG, "tenmil_devices::pcie"));
        assert!(!filter.admits(Level::ERROR, "tenmil_devices::tcp::path_notifier"));
        assert!(filter.admits(Level::DEBUG, "tenmil_devices::tcpx"), "a module is a whole word");
        assert!(!filter.admits(Level::INFO, "tenmil_serve"));
        assert_eq!(filter.most_detailed(), LevelFilter::DEBUG);
    }

    #[test]
    fn wrong_words_are_named() {
        for (text, found) in
            [("loud", "`loud`"), ("", "``"), ("=debug", "`=debug`"), ("a=b", "`b`")]
        {
            let refused = text.parse::<LogFilter>().unwrap_err();
            assert!(refused.starts_with(found) && refused.contains("expected"), "{refused}");
        }
    }
}
