//! Scheduler rules in text form: `dynamic?load=20&isolated=2-3`.

use tenmil_block::uri::Uri;
use tenmil_linux::CpuList;
use tenmil_reactor::thread_scheduler::{Options, Policy};

use tenmil_base::Error;

const EXPECTED: &str = "expected static or dynamic, with period=500ms, load=20, core=80, busy=95, \
                        migration-interval=5s, scheduling-core=0 and isolated=2-3 after a `?`";

/// Parses a policy and its settings.
pub fn parse_scheduler_rules(text: &str) -> Result<Options, String> {
    let unknown = |why: &dyn std::fmt::Display| format!("{why}, {EXPECTED}");
    let (name, query) = text.split_once('?').unwrap_or((text, ""));
    let policy: Policy = name.parse().map_err(|_| unknown(&format_args!("no policy `{name}`")))?;
    let uri: Uri = format!("{name}:?{query}").parse().map_err(|_| unknown(&"not KEY=VALUE"))?;
    let mut fields = uri.options();
    let mut rules = Options { policy, ..Options::default() };
    for (key, setting) in [
        ("load", &mut rules.load_limit),
        ("core", &mut rules.core_limit),
        ("busy", &mut rules.core_busy),
    ] {
        let given = fields.number_value(key, 0..=100).map_err(|error| error.to_string())?;
        *setting = given.and_then(|given| u8::try_from(given).ok()).unwrap_or(*setting);
    }
    for (key, setting) in
        [("period", &mut rules.period), ("migration-interval", &mut rules.migration_interval)]
    {
        *setting = fields.time_value(key).map_err(|error| error.to_string())?.unwrap_or(*setting);
    }
    if let Some(cores) = fields.text_value("scheduling-core") {
        rules.scheduling_core = Some(parse_core(&cores)?);
    }
    if let Some(cores) = fields.text_value("isolated") {
        rules.isolated = CpuList::parse(&cores).map_err(|error| format!("isolated: {error}"))?;
    }
    fields.reject_unconsumed().map_err(|error| unknown(&error))?;
    check_consistency(&rules)?;
    Ok(rules)
}

fn parse_core(text: &str) -> Result<u32, String> {
    let cores = CpuList::parse(text).map_err(|error| format!("scheduling-core: {error}"))?;
    let mut cores = cores.iter();
    match (cores.next(), cores.next()) {
        (Some(core), None) => Ok(core),
        _ => Err(format!("scheduling-core is {text}, expected one core")),
    }
}

/// Rejects cores that this process must not use.
pub fn check_cores_allowed(flag: &str, cores: &CpuList, allowed: &CpuList) -> Result<(), Error> {
    match cores.iter().find(|core| !allowed.contains(*core)) {
        None => Ok(()),
        Some(core) => Err(Error::usage(format!(
            "{flag} {cores}: core {core} does not exist or is not ours, expected some of {allowed}"
        ))),
    }
}

/// Rejects rules about cores that are not scheduled.
pub fn check_rule_cores_scheduled(rules: &Options, cores: &CpuList) -> Result<(), Error> {
    rules.validate(cores).map_err(|why| Error::usage(why.to_string()))
}

/// Checks that the settings are consistent, independent of the cores.
fn check_consistency(rules: &Options) -> Result<(), String> {
    let bare = Options { scheduling_core: None, isolated: CpuList::default(), ..rules.clone() };
    bare.validate(&CpuList::from_iter([0])).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use tenmil_base::Span;
    use tenmil_linux::CpuList;
    use tenmil_reactor::thread_scheduler::{Options, Policy};

    use super::parse_scheduler_rules;

    #[test]
    fn policy_name_alone_has_default_settings() {
        assert_eq!(parse_scheduler_rules("static"), Ok(Options::default()));
        let dynamic = Options { policy: Policy::Dynamic, ..Options::default() };
        assert_eq!(parse_scheduler_rules("dynamic"), Ok(dynamic));
    }

    #[test]
    fn every_scheduler_setting_is_parsed() {
        let all = "dynamic?period=500ms&load=10&core=70&busy=90&migration-interval=2s&scheduling-core=1&isolated=2-3";
        let expected = Options {
            policy: Policy::Dynamic,
            period: Span::from_ms(500),
            load_limit: 10,
            core_limit: 70,
            core_busy: 90,
            migration_interval: Span::from_secs(2),
            scheduling_core: Some(1),
            isolated: CpuList::from_iter([2, 3]),
        };
        assert_eq!(parse_scheduler_rules(all), Ok(expected));
    }

    #[test]
    fn inconsistent_settings_are_rejected_by_value() {
        for (text, said) in [
            ("fair", "no policy `fair`, expected static or dynamic"),
            ("dynamic?lod=3", "lod"),
            ("dynamic?load=101", "load"),
            ("dynamic?load=90", "load limit 90 %, core limit 80 %"),
            ("dynamic?core=99", "core limit 99 %, core busy 95 %"),
            ("static?period=0", "period"),
            ("dynamic?scheduling-core=0-1", "scheduling-core is 0-1, expected one core"),
            ("dynamic?isolated=x", "isolated: "),
        ] {
            let refused = parse_scheduler_rules(text).unwrap_err();
            assert!(refused.contains(said), "{text}: {refused}");
        }
    }
}
