//! The API of a storage server over its control socket or HTTPS.

use std::collections::BTreeMap;
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};
use tenmil_base::Span;
use tenmil_block::uri::Uri;
use tenmil_drivers::pool::VolumeRef;
use tenmil_rpc::{ControlEndpoint, RpcClient};

use crate::connection::NAMESPACE;
use crate::status::{CallResult, Status};
use crate::storage_api::{Host, NewVolume, Pool, PoolVolume, StorageApi, Subsystem};

/// Time limit for a response. A deletion waits on the server until the space is free, up to a minute.
const RESPONSE_TIME_MAX: Span = Span::from_secs(90);
/// Time limit for the device of a deleted subsystem to be closed: I/O in flight ends first.
const CLOSE_TIME_MAX: Duration = Duration::from_secs(20);
const CLOSE_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Client of a storage server, for one call of the driver.
#[derive(Debug)]
pub(crate) struct ApiClient(RpcClient);

impl ApiClient {
    pub(crate) fn connect(endpoint: &ControlEndpoint) -> CallResult<Self> {
        Ok(Self(RpcClient::connect_to(endpoint, RESPONSE_TIME_MAX)?))
    }

    fn call(&mut self, method: &str, parameters: Value) -> CallResult<Value> {
        let parameters = match parameters {
            Value::Object(parameters) => parameters,
            _ => Map::new(),
        };
        Ok(self.0.call_method(method, parameters, RESPONSE_TIME_MAX)?)
    }

    fn rows<T>(
        &mut self,
        (method, parameters): (&str, Value),
        parse: impl Fn(&Value) -> Option<T>,
    ) -> CallResult<Vec<T>> {
        let answer = self.call(method, parameters)?;
        let malformed = || Status::internal(format!("{method}: malformed response of the server"));
        let rows = answer.as_array().ok_or_else(malformed)?;
        rows.iter().map(|row| parse(row).ok_or_else(malformed)).collect()
    }

    /// Waits until a volume is not open. Returns whether it exists.
    fn wait_until_closed(&mut self, pool: &str, name: &str) -> CallResult<bool> {
        let begun = Instant::now();
        loop {
            let users = self.rows(("volumes", json!({ "pool": pool })), |row| {
                Some((text(row, "name")?, row.get("users")?.as_u64()?))
            })?;
            match users.iter().find(|(other, _)| other == name) {
                None => return Ok(false),
                Some((_, 0)) => return Ok(true),
                Some((_, users)) if begun.elapsed() > CLOSE_TIME_MAX => {
                    let text = format!("volume {name}: open {users} times, expected not open");
                    return Err(Status::failed_precondition(text));
                }
                Some(_) => sleep(CLOSE_POLL_INTERVAL),
            }
        }
    }
}

impl StorageApi for ApiClient {
    fn pools(&mut self) -> CallResult<Vec<Pool>> {
        self.rows(("pools", json!({})), |row| {
            Some(Pool {
                uuid: text(row, "uuid")?,
                name: text(row, "name")?,
                uri: text(row, "uri")?,
                free_bytes: row.get("free_bytes")?.as_u64()?,
                stopped_because: text(row, "stopped_because"),
            })
        })
    }

    fn volumes(&mut self, pool: &str) -> CallResult<Vec<PoolVolume>> {
        self.rows(("volumes", json!({ "pool": pool })), |row| {
            Some(PoolVolume {
                name: text(row, "name")?,
                origin: text(row, "origin"),
                is_snapshot: row.get("read_only")?.as_bool()?,
                size_bytes: row.get("size_bytes")?.as_u64()?,
                used_bytes: row.get("used_bytes")?.as_u64()?,
            })
        })
    }

    fn create_volume(&mut self, pool: &str, new: &NewVolume) -> CallResult<()> {
        let NewVolume { name, size_bytes, is_thick, has_checksums } = new;
        let parameters = json!({
            "pool": pool, "name": name, "size_bytes": size_bytes, "thick": is_thick,
            "checksums": has_checksums,
        });
        self.call("set_volume_create", parameters).map(drop)
    }

    fn clone_volume(&mut self, pool: &str, from: &str, name: &str) -> CallResult<()> {
        let parameters = json!({ "pool": pool, "from": from, "name": name });
        self.call("set_volume_clone", parameters).map(drop)
    }

    fn resize_volume(&mut self, pool: &str, name: &str, size_bytes: u64) -> CallResult<()> {
        let parameters = json!({ "pool": pool, "name": name, "size_bytes": size_bytes });
        self.call("set_volume_resize", parameters).map(drop)
    }

    fn delete_volume(&mut self, pool: &str, name: &str) -> CallResult<()> {
        if !self.wait_until_closed(pool, name)? {
            return Ok(());
        }
        let parameters = json!({ "pool": pool, "name": name, "orphan": true, "if_exists": true });
        self.call("set_volume_delete", parameters).map(drop)
    }

    fn snapshot_volumes(&mut self, pool: &str, pairs: &[(String, String)]) -> CallResult<()> {
        let (volumes, names): (Vec<_>, Vec<_>) = pairs.iter().cloned().unzip();
        let parameters = json!({ "pool": pool, "volumes": volumes, "names": names });
        self.call("set_volume_snapshots", parameters).map(drop)
    }

    fn subsystems(&mut self) -> CallResult<Vec<Subsystem>> {
        self.rows(("subsystems", json!({})), |row| {
            let addresses = row.get("listeners")?.as_array()?.iter();
            Some(Subsystem {
                nqn: text(row, "nqn")?,
                namespaces: row.get("namespaces")?.as_u64()?,
                addresses: addresses
                    .map(|address| address.as_str().map(str::to_owned))
                    .collect::<Option<_>>()?,
            })
        })
    }

    fn create_subsystem(&mut self, nqn: &str) -> CallResult<()> {
        self.call("create_subsystem", json!({ "nqn": nqn })).map(drop)
    }

    fn delete_subsystem(&mut self, nqn: &str) -> CallResult<()> {
        self.call("delete_subsystem", json!({ "nqn": nqn })).map(drop)
    }

    fn create_namespace(&mut self, nqn: &str, pool: &Pool, volume: &str) -> CallResult<()> {
        let uri = volume_uri(pool, volume)?;
        let parameters = json!({ "subsystem": nqn, "uri": uri, "nsid": NAMESPACE });
        self.call("create_namespace", parameters).map(drop)
    }

    fn hosts(&mut self) -> CallResult<Vec<Host>> {
        let rows = self.rows(("hosts", json!({})), |row| {
            // Rows of the discovery service and of subsystems for any host are not the driver's.
            let (Some(subsystem), Some(host)) = (text(row, "subsystem"), text(row, "host")) else {
                return Some(None);
            };
            Some(Some(Host { subsystem, host, is_read_only: row.get("read_only")?.as_bool()? }))
        })?;
        Ok(rows.into_iter().flatten().collect())
    }

    fn create_host(&mut self, nqn: &str, host: &str, is_read_only: bool) -> CallResult<()> {
        let parameters = json!({ "subsystem": nqn, "host": host, "read_only": is_read_only });
        self.call("create_host", parameters).map(drop)
    }

    fn delete_host(&mut self, nqn: &str, host: &str) -> CallResult<()> {
        self.call("delete_host", json!({ "subsystem": nqn, "host": host })).map(drop)
    }

    fn set_limits(&mut self, nqn: &str, limits: &BTreeMap<&'static str, u64>) -> CallResult<()> {
        let mut parameters = json!({ "subsystem": nqn });
        for (name, value) in limits {
            parameters[*name] = (*value).into();
        }
        self.call("set_subsystem_limits", parameters).map(drop)
    }
}

/// URI of a volume in the configuration of the server.
fn volume_uri(pool: &Pool, volume: &str) -> CallResult<String> {
    let malformed = |why: &dyn std::fmt::Display| {
        Status::internal(format!("pool {}: device {}: {why}", pool.name, pool.uri))
    };
    let device: Uri = pool.uri.parse().map_err(|why| malformed(&why))?;
    Ok(VolumeRef::pool_on(&device).uri_of_other_volume(volume).to_string())
}

fn text(row: &Value, member: &str) -> Option<String> {
    row.get(member)?.as_str().map(str::to_owned)
}
