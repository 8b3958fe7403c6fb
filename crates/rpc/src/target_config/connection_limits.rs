//! `[limits]` table: connection limits by origin.

use serde::Deserialize;
use tenmil_base::Span;
use tenmil_block::quantity_parser::parse_time;
use tenmil_serve::tcp::{AdmissionLimits, ServiceLimits};
use toml::Spanned;

use super::config_checker::{CheckResult, ConfigChecker};
use super::{ConnectionLimits, IgnoredLineNumber};

/// Table as it is written.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct LimitsTable {
    connections: Option<Spanned<u32>>,
    connections_per_address: Option<Spanned<u32>>,
    connections_per_host: Option<Spanned<u32>>,
    connections_of_loopback: Option<Spanned<u32>>,
    discovery_connections: Option<Spanned<u32>>,
    discovery_connections_per_address: Option<Spanned<u32>>,
    reserved_connections: Option<Spanned<u32>>,
    registrants_per_address: Option<Spanned<u32>>,
    keep_alive_max: Option<Spanned<String>>,
    fair_depth: Option<Spanned<u32>>,
}

/// Largest number of connections of a target.
const CONNECTIONS_MAX: u32 = 1 << 16;
/// Largest number of registrants of a namespace.
const REGISTRANTS_MAX: u32 = 128;
/// Largest depth that hosts divide; 0 is no division.
const FAIR_DEPTH_MAX: u32 = 1 << 16;
/// Range of the longest keep-alive timeout, in seconds.
const KEEP_ALIVE_SECS: std::ops::RangeInclusive<u64> = 1..=86_400;

impl ConnectionLimits {
    /// Completes the limits with defaults derived from the number of connections.
    #[must_use]
    pub fn completed_with_defaults(&self) -> (usize, AdmissionLimits) {
        let connections =
            self.connections.map_or(ServiceLimits::default().connections_max, |most| most as usize);
        let usual = AdmissionLimits::default_for(connections);
        let or = |said: Option<u32>, usual: usize| said.map_or(usual, |said| said as usize);
        let limits = AdmissionLimits {
            per_host_max: or(self.per_host, usual.per_host_max),
            per_address_max: or(self.per_address, usual.per_address_max),
            loopback_max: or(self.of_loopback, usual.loopback_max),
            discovery_per_address_max: or(
                self.discovery_per_address,
                usual.discovery_per_address_max,
            ),
            discovery_max: or(self.discovery, usual.discovery_max),
            unconnected_per_address_max: usual.unconnected_per_address_max,
            reserved: or(self.reserved, usual.reserved),
            registrants_per_address_max: or(
                self.registrants_per_address,
                usual.registrants_per_address_max,
            ),
            keep_alive_max: self.keep_alive_max.unwrap_or(usual.keep_alive_max),
        };
        (connections, limits)
    }
}

impl ConfigChecker<'_> {
    /// Checks the table.
    pub(super) fn check_limits(
        &self,
        table: Option<&Spanned<LimitsTable>>,
    ) -> CheckResult<ConnectionLimits> {
        let Some(found) = table else { return Ok(ConnectionLimits::default()) };
        let table = found.get_ref();
        let some = |key: &str, value: &Option<Spanned<u32>>, (low, high): (u32, u32)| {
            let Some(found) = value else { return Ok(None) };
            let value = *found.get_ref();
            if !(low..=high).contains(&value) {
                let problem = format!("{value}, expected {low} to {high}");
                return Err(self.config_error(key, found, problem));
            }
            Ok(Some(value))
        };
        let connections = some("connections", &table.connections, (1, CONNECTIONS_MAX))?;
        let all =
            connections.map_or(ServiceLimits::default().connections_max, |most| most as usize);
        let all = u32::try_from(all).unwrap_or(CONNECTIONS_MAX);
        let part = |key, value| some(key, value, (1, all));
        Ok(ConnectionLimits {
            connections,
            per_address: part("connections-per-address", &table.connections_per_address)?,
            per_host: part("connections-per-host", &table.connections_per_host)?,
            of_loopback: part("connections-of-loopback", &table.connections_of_loopback)?,
            discovery: part("discovery-connections", &table.discovery_connections)?,
            discovery_per_address: part(
                "discovery-connections-per-address",
                &table.discovery_connections_per_address,
            )?,
            reserved: some("reserved-connections", &table.reserved_connections, (0, all - 1))?,
            registrants_per_address: some(
                "registrants-per-address",
                &table.registrants_per_address,
                (1, REGISTRANTS_MAX),
            )?,
            keep_alive_max: table
                .keep_alive_max
                .as_ref()
                .map(|found| self.parse_keep_alive_max(found))
                .transpose()?,
            fair_depth: some("fair-depth", &table.fair_depth, (0, FAIR_DEPTH_MAX))?,
            line: IgnoredLineNumber(self.line_number(found).0),
        })
    }

    fn parse_keep_alive_max(&self, found: &Spanned<String>) -> CheckResult<Span> {
        let text = found.get_ref();
        let is_within = |span: &Span| {
            (*KEEP_ALIVE_SECS.start() * 1_000_000_000..=*KEEP_ALIVE_SECS.end() * 1_000_000_000)
                .contains(&span.ns)
        };
        parse_time(text).ok().filter(is_within).ok_or_else(|| {
            let problem = format!("'{text}', expected 1s to 86400s, such as 10m");
            self.config_error("keep-alive-max", found, problem)
        })
    }
}
