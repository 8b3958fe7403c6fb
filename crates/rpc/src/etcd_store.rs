//! Store of a gateway group in etcd, by the HTTP gateway of its API (`/v3/…`, JSON).
//!
//! Keys and values are base64, 64-bit numbers are texts. Every request has a time limit; one that was sent and
//! not answered may have been executed.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs};

use base64ct::{Base64, Encoding};
use serde_json::{Value, json};
use tenmil_base::{Error, Instant, Span};
use tenmil_group::{Entry, LeaseId, Snapshot, Store, StoreOperation, StoreReply, Transaction};
use tenmil_linux::Clock;
use tenmil_linux::local_socket::RecvResult;
use tenmil_linux::tcp_connection::TcpConnection;

use crate::error::quote_untrusted;
use crate::http_response::ResponseParser;
use crate::strict_json;

/// Where the store of a group is: the members of an etcd cluster, and the prefix of the keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdUrl {
    /// Addresses, in the order in which they are tried.
    addresses: Vec<SocketAddr>,
    text: String,
}

/// Store of a group in etcd. Each has a connection of its own.
#[derive(Debug)]
pub struct EtcdStore {
    client: EtcdClient,
    prefix: String,
    time_limit: Span,
}

/// Notifications of changes in the store of a group.
#[derive(Debug)]
pub struct EtcdWatch {
    client: EtcdClient,
    prefix: String,
    response: Option<ResponseParser>,
}

/// Connection to one of the members of the etcd cluster.
#[derive(Debug)]
struct EtcdClient {
    url: EtcdUrl,
    /// Index of the address that is used.
    at: usize,
    connection: Option<TcpConnection>,
    clock: Clock,
}

/// Why a request has no reply.
type Trouble = String;

/// gRPC status of a lease that does not exist (NOT_FOUND).
const NOT_FOUND: u64 = 5;

impl EtcdUrl {
    /// Parses `http://HOST:PORT`, or several of them separated by commas, and resolves the names.
    ///
    /// # Errors
    ///
    /// If a URL has another form, or a name has no address.
    pub fn parse(text: &str) -> Result<Self, Error> {
        let mut addresses = Vec::new();
        for url in text.split(',') {
            let shown = quote_untrusted(url);
            if url.starts_with("https://") {
                let text =
                    format!("{shown}: TLS to etcd is not supported, expected http://HOST:PORT");
                let hint = "run etcd on a network of its own, or a local proxy that adds TLS";
                return Err(Error::usage(text).with_hint(hint));
            }
            let authority = url.strip_prefix("http://").map(|rest| rest.trim_end_matches('/'));
            let authority = authority.filter(|authority| authority.contains(':'));
            let Some(authority) = authority else {
                let text = format!("{shown} is no URL of etcd, expected http://HOST:PORT");
                return Err(Error::usage(text));
            };
            let found = authority.to_socket_addrs();
            addresses.extend(found.map_err(|error| Error::usage(format!("{shown}: {error}")))?);
        }
        Ok(Self { addresses, text: text.to_owned() })
    }

    /// Ports of the addresses.
    pub fn ports(&self) -> impl Iterator<Item = u16> {
        self.addresses.iter().map(SocketAddr::port)
    }
}

impl std::fmt::Display for EtcdUrl {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(&self.text)
    }
}

impl EtcdStore {
    /// A store with the keys of this group. An operation takes `time_limit` at most.
    #[must_use]
    pub fn new(url: &EtcdUrl, group: &str, clock: Clock, time_limit: Span) -> Self {
        Self { client: EtcdClient::new(url, clock), prefix: prefix_of_group(group), time_limit }
    }

    fn try_execute(&mut self, operation: &StoreOperation) -> Result<StoreReply, Trouble> {
        let (path, body) = match operation {
            StoreOperation::Grant { time_to_live } => {
                let seconds = time_to_live.ns.div_ceil(1_000_000_000);
                ("/v3/lease/grant", json!({ "TTL": seconds }))
            }
            StoreOperation::Renew(lease) => ("/v3/lease/keepalive", json!({ "ID": lease.0 })),
            StoreOperation::Revoke(lease) => ("/v3/lease/revoke", json!({ "ID": lease.0 })),
            StoreOperation::Read => ("/v3/kv/range", key_range(&self.prefix)),
            StoreOperation::Commit(transaction) => {
                ("/v3/kv/txn", encode_transaction(&self.prefix, transaction))
            }
        };
        let answer = self.client.post(path, &body, self.time_limit)?;
        if let Some(reply) = reply_of_error(&answer) {
            return reply;
        }
        match operation {
            StoreOperation::Grant { .. } => {
                let id = number(&answer["ID"]).ok_or_else(|| malformed(path, &answer))?;
                Ok(StoreReply::Granted(LeaseId(id)))
            }
            // The reply to the renewal of a lease that has ended has no time to live.
            StoreOperation::Renew(_) => match number(&answer["result"]["TTL"]) {
                Some(1..) => Ok(StoreReply::Done),
                _ if answer["result"].is_object() => Ok(StoreReply::LeaseEnded),
                _ => Err(malformed(path, &answer)),
            },
            StoreOperation::Revoke(_) => Ok(StoreReply::Done),
            StoreOperation::Read => decode_snapshot(&self.prefix, &answer)
                .map(StoreReply::Snapshot)
                .ok_or_else(|| malformed(path, &answer)),
            StoreOperation::Commit(_) => match answer["succeeded"].as_bool() {
                Some(true) => Ok(StoreReply::Committed),
                _ if answer["header"].is_object() => Ok(StoreReply::Conflict),
                _ => Err(malformed(path, &answer)),
            },
        }
    }
}

impl Store for EtcdStore {
    fn execute(&mut self, operation: &StoreOperation) -> StoreReply {
        self.try_execute(operation).unwrap_or_else(|trouble| {
            self.client.use_next_address();
            StoreReply::Unknown(trouble)
        })
    }
}

impl EtcdWatch {
    /// Notifications of changes of the keys of this group.
    #[must_use]
    pub fn new(url: &EtcdUrl, group: &str, clock: Clock) -> Self {
        let prefix = prefix_of_group(group);
        Self { client: EtcdClient::new(url, clock), prefix, response: None }
    }

    /// Waits for a change, up to `time_limit`. True if there may be one: also after the connection was lost and
    /// made again.
    ///
    /// # Errors
    ///
    /// Why there is no connection; then nothing is waited for.
    pub fn wait(&mut self, time_limit: Span) -> Result<bool, Trouble> {
        let result = self.try_wait(time_limit);
        if result.is_err() {
            self.response = None;
            self.client.use_next_address();
        }
        result
    }

    fn try_wait(&mut self, time_limit: Span) -> Result<bool, Trouble> {
        let end = self.client.clock.now().after(time_limit);
        if self.response.is_none() {
            let body = json!({ "create_request": key_range(&self.prefix) });
            self.client.send("/v3/watch", &body, end)?;
            self.response = Some(ResponseParser::default());
            return Ok(true);
        }
        let Some(response) = &mut self.response else { return Ok(true) };
        if !self.client.receive(response, end)? {
            return Ok(false);
        }
        if response.is_complete() {
            return Err("watch: the stream has ended".to_owned());
        }
        Ok(!response.take_body().is_empty())
    }
}

impl EtcdClient {
    fn new(url: &EtcdUrl, clock: Clock) -> Self {
        Self { url: url.clone(), at: 0, connection: None, clock }
    }

    fn use_next_address(&mut self) {
        self.connection = None;
        self.at = (self.at + 1) % self.url.addresses.len().max(1);
    }

    /// Sends a request and returns the JSON document of the reply.
    fn post(&mut self, path: &str, body: &Value, time_limit: Span) -> Result<Value, Trouble> {
        let end = self.clock.now().after(time_limit);
        self.send(path, body, end)?;
        let mut response = ResponseParser::default();
        while !response.is_complete() {
            if !self.receive(&mut response, end)? {
                return Err(format!("{path}: no reply within {time_limit}"));
            }
        }
        if response.head().is_none_or(|head| head.closes) {
            self.connection = None;
        }
        let body = response.take_body();
        // A stream of one result is followed by a line break.
        strict_json::parse_json(body.trim_ascii())
            .map_err(|_| format!("{path}: the reply is no JSON document, expected one of etcd"))
    }

    fn send(&mut self, path: &str, body: &Value, end: Instant) -> Result<(), Trouble> {
        let Some(address) = self.url.addresses.get(self.at).copied() else {
            return Err("etcd has no address".to_owned());
        };
        let of_address = |error: io::Error| format!("etcd at {address}: {error}");
        // A connection that has something to receive now was closed by the other end.
        self.connection = self
            .connection
            .take()
            .filter(|open| matches!(open.receive(&mut [0]), Ok(RecvResult::WouldBlock)));
        let connection = match self.connection.take() {
            Some(connection) => connection,
            None => {
                TcpConnection::connect(address, end.since(self.clock.now())).map_err(of_address)?
            }
        };
        let body = body.to_string();
        let request = format!(
            "POST {path} HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\n\
             content-length: {}\r\n\r\n{body}",
            body.len()
        );
        let mut rest = request.as_bytes();
        while !rest.is_empty() {
            let sent = connection.send(rest).map_err(of_address)?;
            rest = &rest[sent..];
            if sent == 0
                && !connection.wait_to_send(end.since(self.clock.now())).map_err(of_address)?
            {
                return Err(format!("etcd at {address}: {path} cannot be sent"));
            }
        }
        self.connection = Some(connection);
        Ok(())
    }

    /// Receives what there is. False if nothing arrives until `end`.
    fn receive(&mut self, response: &mut ResponseParser, end: Instant) -> Result<bool, Trouble> {
        let Some(connection) = &self.connection else {
            return Err("etcd: the connection was lost".to_owned());
        };
        let mut bytes = [0; 16 << 10];
        loop {
            match connection.receive(&mut bytes).map_err(|error| format!("etcd: {error}"))? {
                RecvResult::Bytes(count) => {
                    response.receive(&bytes[..count]).map_err(|error| error.message)?;
                    return Ok(true);
                }
                RecvResult::Eof if response.handle_stream_end() => return Ok(true),
                RecvResult::Eof => return Err("etcd: the connection was closed".to_owned()),
                RecvResult::WouldBlock => {}
            }
            let left = end.since(self.clock.now());
            let is_ready = left.ns > 0
                && connection.wait_to_receive(left).map_err(|error| format!("etcd: {error}"))?;
            if !is_ready {
                return Ok(false);
            }
        }
    }
}

fn prefix_of_group(group: &str) -> String {
    format!("/tenmil/group/{group}/")
}

/// All keys with a prefix: from it up to the first key behind those.
fn key_range(prefix: &str) -> Value {
    let mut end = prefix.as_bytes().to_vec();
    if let Some(last) = end.last_mut() {
        *last += 1;
    }
    json!({ "key": base64(prefix.as_bytes()), "range_end": base64(&end) })
}

fn encode_transaction(prefix: &str, transaction: &Transaction) -> Value {
    let key = |key: &str| base64(format!("{prefix}{key}").as_bytes());
    let compare = transaction.conditions.iter().map(|condition| {
        json!({
            "key": key(&condition.key),
            "target": "MOD",
            "result": "EQUAL",
            "mod_revision": condition.revision.to_string(),
        })
    });
    let puts = transaction.puts.iter().map(|put| {
        let lease = put.lease.map_or(0, |lease| lease.0).to_string();
        let value = base64(put.value.as_bytes());
        json!({ "request_put": { "key": key(&put.key), "value": value, "lease": lease } })
    });
    json!({ "compare": compare.collect::<Vec<_>>(), "success": puts.collect::<Vec<_>>() })
}

fn decode_snapshot(prefix: &str, answer: &Value) -> Option<Snapshot> {
    let mut snapshot = Snapshot::default();
    // A reply without keys has no list of them.
    answer["header"].as_object()?;
    for pair in answer["kvs"].as_array().into_iter().flatten() {
        let text = |field: &str| {
            let bytes = Base64::decode_vec(pair[field].as_str().unwrap_or_default()).ok()?;
            String::from_utf8(bytes).ok()
        };
        let key = text("key")?.strip_prefix(prefix)?.to_owned();
        let revision = number(&pair["mod_revision"])?;
        snapshot.entries.insert(key, Entry { value: text("value")?, revision });
    }
    Some(snapshot)
}

/// Reply to an operation that etcd has refused.
fn reply_of_error(answer: &Value) -> Option<Result<StoreReply, Trouble>> {
    // A stream has its error in an object.
    let error = if answer["error"].is_object() { &answer["error"] } else { answer };
    let code = error.get("code").or_else(|| error.get("grpc_code"))?;
    if number(code) == Some(NOT_FOUND) {
        return Some(Ok(StoreReply::LeaseEnded));
    }
    let text = error["message"].as_str().or_else(|| error["error"].as_str());
    Some(Err(format!("etcd: {}", quote_untrusted(text.unwrap_or("an error without a text")))))
}

/// A number, which etcd writes as a text if it has 64 bits.
fn number(value: &Value) -> Option<u64> {
    value.as_u64().or_else(|| value.as_str()?.parse().ok())
}

fn malformed(path: &str, answer: &Value) -> Trouble {
    let text = answer.to_string();
    let shown = quote_untrusted(&text[..text.floor_char_boundary(200)]);
    format!("{path}: the reply is {shown}, expected one of etcd")
}

fn base64(bytes: &[u8]) -> String {
    Base64::encode_string(bytes)
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use tenmil_group::StoreReply;

    use super::{EtcdUrl, base64, decode_snapshot, key_range, reply_of_error};

    #[test]
    fn urls_are_resolved_and_others_rejected() {
        let url = EtcdUrl::parse("http://127.0.0.1:2379,http://[::1]:2380/").unwrap();
        assert_eq!(url.ports().collect::<Vec<_>>(), [2379, 2380]);
        for wrong in ["127.0.0.1:2379", "http://127.0.0.1", "https://127.0.0.1:1", ""] {
            let error = EtcdUrl::parse(wrong).unwrap_err();
            assert!(error.text.contains("expected http://HOST:PORT"), "{}", error.text);
        }
    }

    #[test]
    fn keys_of_a_reply_lose_the_prefix() {
        let pair = json!({ "key": base64(b"/g/a"), "value": base64(b"1"), "mod_revision": "7" });
        let answer = json!({ "header": { "revision": "9" }, "kvs": [pair] });
        let snapshot = decode_snapshot("/g/", &answer).unwrap();
        assert_eq!((snapshot.entries["a"].value.as_str(), snapshot.revision_of("a")), ("1", 7));
        assert!(decode_snapshot("/g/", &json!({ "header": {} })).unwrap().entries.is_empty());
        assert_eq!(decode_snapshot("/g/", &json!({})), None);
        assert_eq!(decode_snapshot("/h/", &answer), None, "another group");
        assert_eq!(key_range("/g/")["range_end"], base64(b"/g0"));
    }

    #[test]
    fn lease_that_does_not_exist_has_ended_and_other_errors_are_unknown() {
        for gone in [json!({ "code": 5, "error": "x" }), json!({ "error": { "grpc_code": 5 } })] {
            assert_eq!(reply_of_error(&gone), Some(Ok(StoreReply::LeaseEnded)));
        }
        let other = reply_of_error(&json!({ "code": 14, "message": "no leader" }));
        assert!(matches!(other, Some(Err(text)) if text.contains("no leader")));
        assert_eq!(reply_of_error(&json!({ "header": {} })), None);
    }
}
