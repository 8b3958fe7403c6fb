//! What a node needs to connect to a volume: the publish context of the controller's response.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use crate::names::{VolumeId, is_host_nqn};
use crate::status::{CallResult, Status};

/// How a node connects to a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Connection {
    /// NQN of the subsystem that has the volume as namespace 1.
    pub(crate) nqn: String,
    /// Addresses and ports of the target: several paths to the same namespace.
    pub(crate) addresses: Vec<String>,
    /// NQN of the host.
    pub(crate) host: String,
}

/// Namespace identifier of every volume.
pub(crate) const NAMESPACE: u32 = 1;
const NQN: &str = "nqn";
const ADDRESSES: &str = "addresses";
const HOST: &str = "host";

impl Connection {
    /// The publish context.
    pub(crate) fn to_context(&self) -> BTreeMap<String, String> {
        let Self { nqn, addresses, host } = self;
        let pairs = [(NQN, nqn.clone()), (ADDRESSES, addresses.join(",")), (HOST, host.clone())];
        pairs.map(|(key, value)| (key.to_owned(), value)).into()
    }

    /// Parses the publish context of a volume. Nothing of it reaches the kernel unchecked.
    pub(crate) fn from_context(
        id: &VolumeId,
        context: &BTreeMap<String, String>,
    ) -> CallResult<Self> {
        let text = |key: &str| context.get(key).map(String::as_str).unwrap_or_default();
        let refuse = |key: &str, expected: &str| {
            let text = format!("publish_context: {key} `{}`, expected {expected}", text(key));
            Err(Status::invalid_argument(text))
        };
        let nqn = id.nqn();
        if text(NQN) != nqn {
            return refuse(NQN, &nqn);
        }
        let addresses: Vec<_> = text(ADDRESSES).split(',').map(str::to_owned).collect();
        let is_address = |address: &String| address.parse::<SocketAddr>().is_ok();
        if !addresses.iter().all(is_address) {
            return refuse(ADDRESSES, "ADDRESS:PORT, separated by commas");
        }
        if !is_host_nqn(text(HOST)) {
            return refuse(HOST, "the NQN of a host");
        }
        Ok(Self { nqn, addresses, host: text(HOST).to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::Connection;
    use crate::names::VolumeId;

    #[test]
    fn context_is_read_back_and_another_one_is_refused() {
        let id = VolumeId::new("0123456789abcdef0123456789abcdef", "a");
        let connection = Connection {
            nqn: id.nqn(),
            addresses: vec!["192.0.2.1:4420".into(), "[2001:db8::1]:4420".into()],
            host: "nqn.2014-08.org.example:node".into(),
        };
        let context = connection.to_context();
        assert_eq!(Connection::from_context(&id, &context), Ok(connection));
        for (key, value) in [
            ("nqn", "nqn.2014-08.org.example:other"),
            ("addresses", ""),
            ("addresses", "192.0.2.1"),
            ("addresses", "192.0.2.1:4420,hostnqn=x"),
            ("host", "node"),
            ("host", "nqn.2014-08.org.example:node,hostid=x"),
        ] {
            let mut wrong = context.clone();
            wrong.insert(key.into(), value.into());
            let refused = Connection::from_context(&id, &wrong).unwrap_err();
            assert!(refused.message.contains(key), "{key}={value}: {refused}");
        }
    }
}
