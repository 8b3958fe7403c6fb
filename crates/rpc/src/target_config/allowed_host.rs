//! Entry of `allowed-hosts`: a host NQN, or a table with its keys and rights.

use std::fmt;

use serde::de::value::MapAccessDeserializer;
use serde::de::{Error, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use toml::Spanned;

use super::rate_limits::RateLimitsTable;

/// Entry as it is written.
#[derive(Debug)]
pub(super) enum AllowedHost {
    /// `"nqn…"`.
    Name(String),
    /// `{ nqn = "nqn…", … }`.
    Table(Box<HostTable>),
}

/// Table of a host.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct HostTable {
    pub(super) nqn: Spanned<String>,
    pub(super) dhchap: Option<Spanned<Vec<Spanned<String>>>>,
    pub(super) dhchap_controller: Option<Spanned<String>>,
    pub(super) psk: Option<Spanned<Vec<Spanned<String>>>>,
    pub(super) read_only: Option<Spanned<ReadOnly>>,
    pub(super) reservations: Option<Spanned<bool>>,
    pub(super) connections: Option<Spanned<u32>>,
    pub(super) buffer_memory: Option<Spanned<String>>,
    pub(super) limits: Option<Spanned<RateLimitsTable>>,
}

/// Namespaces that a host may only read: `true`, `false`, or their identifiers.
#[derive(Debug)]
pub(super) enum ReadOnly {
    All(bool),
    Listed(Vec<u32>),
}

impl AllowedHost {
    /// Its NQN without the position, if it is a name alone.
    pub(super) fn nqn(&self) -> &str {
        match self {
            Self::Name(nqn) => nqn,
            Self::Table(table) => table.nqn.get_ref(),
        }
    }

    /// Whether it has rate limits and nothing else, as beside `allow-any-host`.
    pub(super) fn has_limits_alone(&self) -> bool {
        let Self::Table(table) = self else { return false };
        let HostTable { nqn: _, dhchap, dhchap_controller, psk, read_only, .. } = &**table;
        let HostTable { reservations, connections, buffer_memory, limits, .. } = &**table;
        let has_keys = dhchap.is_some() || dhchap_controller.is_some() || psk.is_some();
        let has_rights = read_only.is_some()
            || reservations.is_some()
            || connections.is_some()
            || buffer_memory.is_some();
        limits.is_some() && !has_keys && !has_rights
    }
}

impl<'de> Deserialize<'de> for AllowedHost {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct HostVisitor;

        impl<'de> Visitor<'de> for HostVisitor {
            type Value = AllowedHost;

            fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                out.write_str("a host NQN, or a table such as { nqn = \"…\", psk = [\"NAME\"] }")
            }

            fn visit_str<E: Error>(self, nqn: &str) -> Result<AllowedHost, E> {
                Ok(AllowedHost::Name(nqn.to_owned()))
            }

            fn visit_map<A: MapAccess<'de>>(self, table: A) -> Result<AllowedHost, A::Error> {
                let table = HostTable::deserialize(MapAccessDeserializer::new(table))?;
                Ok(AllowedHost::Table(Box::new(table)))
            }
        }

        deserializer.deserialize_any(HostVisitor)
    }
}

impl<'de> Deserialize<'de> for ReadOnly {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ReadOnlyVisitor;

        impl<'de> Visitor<'de> for ReadOnlyVisitor {
            type Value = ReadOnly;

            fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                out.write_str("true, false, or a list of namespace identifiers")
            }

            fn visit_bool<E: Error>(self, all: bool) -> Result<ReadOnly, E> {
                Ok(ReadOnly::All(all))
            }

            fn visit_seq<A: serde::de::SeqAccess<'de>>(
                self,
                mut list: A,
            ) -> Result<ReadOnly, A::Error> {
                let mut nsids = Vec::new();
                while let Some(nsid) = list.next_element()? {
                    nsids.push(nsid);
                }
                Ok(ReadOnly::Listed(nsids))
            }
        }

        deserializer.deserialize_any(ReadOnlyVisitor)
    }
}
