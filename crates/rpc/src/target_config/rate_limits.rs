//! `limits` of a subsystem, of its hosts, of its namespaces, and of an NBD export: rate limits.
//!
//! ```toml
//! [[subsystem]]
//! nqn = "nqn.2026-01.org.example:disks"
//! limits = { bytes = "4g" }                                        # of all hosts together
//! host-limits = { iops = "20k", burst = "2s" }                     # of each host without its own
//! allowed-hosts = [
//!     { nqn = "nqn.2014-08.org.example:db", limits = { read-iops = "100k", write-iops = "50k" } },
//! ]
//!
//! [[subsystem.namespace]]
//! uri = "file:/var/tmp/disk"
//! limits = { write-bytes = "200m" }                                # of all hosts together
//! ```

use std::num::NonZeroU64;

use serde::Deserialize;
use tenmil_base::Span;
use tenmil_block::quantity_parser::{parse_count, parse_size, parse_time};
use tenmil_block::{QosLimits, RateLimit};
use tenmil_serve::tcp::ExportLimits;
use toml::Spanned;

use super::allowed_host::AllowedHost;
use super::config_checker::{CheckResult, ConfigChecker};
use super::config_file::SubsystemTable;

/// Table as it is written.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct RateLimitsTable {
    iops: Option<Spanned<Quantity>>,
    read_iops: Option<Spanned<Quantity>>,
    write_iops: Option<Spanned<Quantity>>,
    bytes: Option<Spanned<Quantity>>,
    read_bytes: Option<Spanned<Quantity>>,
    write_bytes: Option<Spanned<Quantity>>,
    burst: Option<Spanned<String>>,
}

/// Number, or one with a unit.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Quantity {
    Number(u64),
    Text(String),
}

/// Longest burst.
const BURST_MAX: Span = Span::from_secs(3_600);

impl ConfigChecker<'_> {
    /// Checks all rate limits of a subsystem with these namespaces, which are those of its tables.
    pub(super) fn check_export_limits(
        &self,
        table: &SubsystemTable,
        namespaces: &[(u32, Option<&Spanned<RateLimitsTable>>)],
    ) -> CheckResult<ExportLimits> {
        let of = |key: &str, found: Option<&Spanned<RateLimitsTable>>| {
            found.map(|found| self.check_rate_limits(key, found)).transpose()
        };
        let mut limits = ExportLimits {
            subsystem: of("limits", table.limits.as_ref())?.unwrap_or_default(),
            each_host: of("host-limits", table.host_limits.as_ref())?.unwrap_or_default(),
            ..ExportLimits::default()
        };
        for host in table.allowed_hosts.iter().flat_map(|hosts| hosts.get_ref()) {
            if let AllowedHost::Table(host) = host.get_ref()
                && let Some(of_host) = of("limits", host.limits.as_ref())?
            {
                limits.hosts.insert(host.nqn.get_ref().clone(), of_host);
            }
        }
        for (nsid, found) in namespaces {
            if let Some(of_namespace) = of("limits", *found)? {
                limits.namespaces.insert(*nsid, of_namespace);
            }
        }
        Ok(limits)
    }

    /// Checks one table of rate limits, the value of `key`.
    pub(super) fn check_rate_limits(
        &self,
        key: &str,
        found: &Spanned<RateLimitsTable>,
    ) -> CheckResult<QosLimits> {
        let table = found.get_ref();
        let count = |key: &str, value: &Option<Spanned<Quantity>>| {
            self.check_rate(key, value.as_ref(), parse_count)
        };
        let size = |key: &str, value: &Option<Spanned<Quantity>>| {
            self.check_rate(key, value.as_ref(), parse_size)
        };
        let rate = |(iops, iops_value), (bytes, bytes_value)| {
            Ok(RateLimit { iops: count(iops, iops_value)?, bytes: size(bytes, bytes_value)? })
        };
        let burst = table.burst.as_ref().map(|found| self.check_burst(found)).transpose()?;
        let limits = QosLimits {
            total: rate(("iops", &table.iops), ("bytes", &table.bytes))?,
            reads: rate(("read-iops", &table.read_iops), ("read-bytes", &table.read_bytes))?,
            writes: rate(("write-iops", &table.write_iops), ("write-bytes", &table.write_bytes))?,
            burst: burst.unwrap_or_default(),
        };
        if limits.is_unlimited() && burst.is_some() {
            let problem = "it has a burst and no rate, expected one such as iops = 10000";
            return Err(self.config_error(key, found, problem));
        }
        Ok(limits)
    }

    fn check_rate(
        &self,
        key: &str,
        found: Option<&Spanned<Quantity>>,
        parse: impl Fn(&str) -> Result<u64, String>,
    ) -> CheckResult<Option<NonZeroU64>> {
        let Some(found) = found else { return Ok(None) };
        let value = match found.get_ref() {
            Quantity::Number(number) => Ok(*number),
            Quantity::Text(text) => parse(text),
        };
        let value = value.map_err(|problem| self.config_error(key, found, problem))?;
        let rate = NonZeroU64::new(value).ok_or_else(|| {
            let problem = "0, expected at least 1, or no such key for no limit";
            self.config_error(key, found, problem)
        })?;
        Ok(Some(rate))
    }

    fn check_burst(&self, found: &Spanned<String>) -> CheckResult<Span> {
        let text = found.get_ref();
        let burst = parse_time(text).ok().filter(|burst| *burst <= BURST_MAX);
        burst.ok_or_else(|| {
            let problem = format!("'{text}', expected a time up to 1 hour, such as 500ms or 2s");
            self.config_error("burst", found, problem)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;

    use tenmil_base::Span;
    use tenmil_block::{QosLimits, RateLimit};

    use crate::target_config::TargetConfig;

    const FILE: &str = "\
        [[listener]]\n\
        address = \"127.0.0.1:4420\"\n\
        [[subsystem]]\n\
        nqn = \"nqn.2026-01.org.example:disks\"\n\
        LIMITS\n\
        [[subsystem.namespace]]\n\
        uri = \"null:\"\n\
        [[subsystem.namespace]]\n\
        uri = \"ram:1m\"\n";

    fn rate(iops: u64, bytes: u64) -> RateLimit {
        RateLimit { iops: NonZeroU64::new(iops), bytes: NonZeroU64::new(bytes) }
    }

    #[test]
    fn limits_are_read_at_every_place() {
        let text = FILE
            .replace(
                "LIMITS",
                "limits = { bytes = \"4g\" }\n\
                 host-limits = { iops = \"20k\", burst = \"2s\" }\n\
                 allowed-hosts = [\"nqn.2014-08.org.example:a\", { nqn = \
                 \"nqn.2014-08.org.example:b\", limits = { read-iops = 7, write-bytes = \"1m\" } }]",
            )
            .replace("\"ram:1m\"", "\"ram:1m\"\nlimits = { iops = 5000, write-iops = \"1k\" }");
        let config = TargetConfig::parse(&text).unwrap();
        let limits = &config.subsystems[0].limits;
        let none = QosLimits::default();
        assert_eq!(limits.subsystem, QosLimits { total: rate(0, 4 << 30), ..none });
        let burst = Span::from_secs(2);
        assert_eq!(limits.each_host, QosLimits { total: rate(20_000, 0), burst, ..none });
        let host = QosLimits { reads: rate(7, 0), writes: rate(0, 1 << 20), ..none };
        assert_eq!(
            limits.hosts.iter().collect::<Vec<_>>(),
            [(&"nqn.2014-08.org.example:b".to_owned(), &host)]
        );
        let second = QosLimits { total: rate(5_000, 0), writes: rate(1_000, 0), ..none };
        assert_eq!(limits.namespaces.iter().collect::<Vec<_>>(), [(&2, &second)]);
    }

    #[test]
    fn wrong_limits_are_refused_with_their_line() {
        for (limits, expected) in [
            ("limits = { iops = 0 }", "line 5, `iops`: 0, expected at least 1"),
            ("limits = { bytes = \"x\" }", "line 5, `bytes`: `x` is not a size"),
            ("limits = { burst = \"2s\" }", "line 5, `limits`: it has a burst and no rate"),
            ("limits = { iops = 5, burst = \"2h\" }", "line 5, `burst`: '2h', expected a time"),
            ("host-limits = { iopz = 5 }", "line 5"),
        ] {
            let error = TargetConfig::parse(&FILE.replace("LIMITS", limits)).unwrap_err();
            assert!(error.to_string().starts_with(expected), "{error}, expected {expected}");
        }
    }
}
