//! Stores of gateway groups, by their URIs.

use std::fmt;

use tenmil_base::{Error, Span};
use tenmil_group::Store;
use tenmil_linux::Clock;
use tenmil_rbd::{RadosStore, RadosUri, RadosWatch, StoreCluster};

use crate::{EtcdStore, EtcdUrl, EtcdWatch};

/// Where the store of a group is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GroupStoreUri {
    /// `etcd:http://HOST:PORT`.
    Etcd(EtcdUrl),
    /// `rados:POOL/OBJECT`.
    Rados(Box<RadosUri>),
}

/// Store of a group as its members use it: each part has a thread.
pub struct OpenedStore {
    /// For operations on leases.
    pub leases: Box<dyn Store + Send>,
    /// For operations on the map.
    pub map: Box<dyn Store + Send>,
    /// For changes.
    pub watch: Box<dyn StoreWatch + Send>,
}

/// Notifications of changes in a store.
pub trait StoreWatch {
    /// Waits for a change, up to `time_limit`. True if there may be one.
    ///
    /// # Errors
    ///
    /// Why nothing is watched; then nothing is waited for.
    fn wait(&mut self, time_limit: Span) -> Result<bool, String>;
}

const ETCD: &str = "etcd:";
const RADOS: &str = "rados:";

impl GroupStoreUri {
    /// Parses a store.
    ///
    /// # Errors
    ///
    /// If it is of no kind, or has another form.
    pub fn parse(text: &str) -> Result<Self, Error> {
        if let Some(url) = text.strip_prefix(ETCD) {
            return EtcdUrl::parse(url).map(Self::Etcd);
        }
        if text.starts_with(RADOS) {
            return Ok(Self::Rados(Box::new(RadosUri::parse(text)?)));
        }
        let text = format!("'{text}', expected etcd:http://HOST:PORT or rados:POOL/OBJECT");
        Err(Error::usage(text))
    }

    /// Opens the store. Nothing is connected yet; an operation takes `time_limit` at most.
    ///
    /// # Errors
    ///
    /// If a descriptor cannot be had.
    pub fn open(&self, group: &str, clock: Clock, time_limit: Span) -> Result<OpenedStore, Error> {
        Ok(match self {
            Self::Etcd(url) => {
                let store = || Box::new(EtcdStore::new(url, group, clock, time_limit));
                let watch = Box::new(EtcdWatch::new(url, group, clock));
                OpenedStore { leases: store(), map: store(), watch }
            }
            Self::Rados(uri) => {
                let cluster = StoreCluster::new(uri, time_limit);
                let store =
                    || Box::new(RadosStore::new(&cluster, group, tenmil_linux::random_seed()));
                let watch = Box::new(RadosWatch::new(&cluster, group, clock)?);
                OpenedStore { leases: store(), map: store(), watch }
            }
        })
    }
}

impl fmt::Display for GroupStoreUri {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Etcd(url) => write!(out, "{ETCD}{url}"),
            Self::Rados(uri) => write!(out, "{uri}"),
        }
    }
}

impl StoreWatch for EtcdWatch {
    fn wait(&mut self, time_limit: Span) -> Result<bool, String> {
        self.wait(time_limit)
    }
}

impl StoreWatch for RadosWatch {
    fn wait(&mut self, time_limit: Span) -> Result<bool, String> {
        self.wait(time_limit)
    }
}

#[cfg(test)]
mod tests {
    use super::GroupStoreUri;

    #[test]
    fn stores_are_shown_as_they_are_parsed() {
        for text in ["etcd:http://127.0.0.1:2379,http://127.0.0.1:2380", "rados:rbd/group?user=gw"]
        {
            assert_eq!(GroupStoreUri::parse(text).unwrap().to_string(), text);
        }
        for (wrong, expected) in [
            ("redis:x", "expected etcd:http://HOST:PORT or rados:POOL/OBJECT"),
            ("rados:rbd", "names no object"),
            ("etcd:x", "is no URL of etcd"),
        ] {
            let error = GroupStoreUri::parse(wrong).unwrap_err();
            assert!(error.text.contains(expected), "{error}");
        }
    }
}
