//! Fuzzer: feeds arbitrary bytes to both sides of the API and checks the invariants.

use serde_json::{Map, Value};

use crate::api::{Api, ApiReply, ApiRequest, ApiResponse, JSON};
use crate::arguments::Arguments;
use crate::http_response::{EventStreamParser, ResponseParser};
use crate::method::{Method, MethodKind};
use crate::methods::SAME_EVERYWHERE;
use crate::passed_fd::PassedFd;
use crate::process_parts::ProcessParts;
use crate::route::RouteTable;
use crate::target_config::TargetConfig;

/// Feeds `bytes` to the server's side as a request, `VERB TARGET`, a line break and a body; to the
/// client's side as a response; and to the parser of configuration files.
///
/// # Panics
///
/// If an invariant is violated: a bug of this crate, whatever the bytes are.
pub fn fuzz_api_request(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let (head, body) = text.split_once('\n').unwrap_or((&text, ""));
    let (verb, target) = head.split_once(' ').unwrap_or(("GET", head));
    let first = answer(verb, target, body.as_bytes());
    assert_eq!(first, answer(verb, target, body.as_bytes()), "a repeated request");
    if let Ok(Value::Object(parameters)) = serde_json::from_str(body) {
        SAME_EVERYWHERE.methods().for_each(|method| check_round_trip(method, &parameters));
    }
    let _ = ResponseParser::default().receive(bytes);
    let _ = EventStreamParser::default().receive(bytes, &mut Vec::new());
    if let Ok(text) = core::str::from_utf8(bytes)
        && let Err(wrong) = TargetConfig::parse(text)
    {
        assert!((1..=text.lines().count() + 1).contains(&wrong.line), "{wrong}");
    }
}

/// Answers a request. `None` for a stream of events.
fn answer(verb: &str, target: &str, body: &[u8]) -> Option<ApiResponse> {
    // No parts: the state of a real process would not be reproducible.
    let api = Api::new(&SAME_EVERYWHERE, ProcessParts::new());
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    if path == "/metrics" {
        // They change with the time.
        return None;
    }
    let passed = &PassedFd::default();
    let (accept, client) = ("", "fuzz");
    match api.answer(ApiRequest { verb, path, query, accept, body, client, passed }) {
        ApiReply::Now(response) => {
            check_response(&response);
            Some(response)
        }
        ApiReply::Events(_) => None,
        ApiReply::Later(_) => panic!("no method of the table has a deferred reply"),
    }
}

/// Checks that a response is JSON, and an error if its status is one.
fn check_response(response: &ApiResponse) {
    assert!((200..600).contains(&response.status), "{}", response.status);
    if response.content_type != JSON {
        return;
    }
    let value: Value = serde_json::from_slice(&response.body).expect("a response is JSON");
    assert_eq!(response.status >= 400, value.get("error").is_some(), "{value}");
}

/// Checks that a call that a client may make reaches the method with the same arguments.
fn check_round_trip(method: &'static Method, parameters: &Map<String, Value>) {
    let Ok(arguments) = Arguments::validate(method, parameters) else { return };
    let routes = RouteTable::new(&SAME_EVERYWHERE);
    let request = routes.encode(method, parameters.clone()).expect("a valid call is encoded");
    let path = request.target.split('?').next().unwrap_or_default();
    let found = routes.find(request.verb.name(), path).expect("an encoded path exists");
    assert!(std::ptr::eq(found.route.method, method), "{}", request.target);
    let received = crate::api::request_arguments(&found, &request);
    assert_eq!(received.as_ref(), Ok(&arguments), "{}", request.target);
    assert!(method.verb != MethodKind::Get || request.body.is_none());
}

#[cfg(test)]
mod tests {
    use tenmil_base::Random;

    use super::{answer, fuzz_api_request};

    const REQUESTS: [&str; 8] = [
        "GET /v1/methods",
        "GET /v1/threads?name=submit-0",
        "GET /v1/process?x=1",
        "POST /v1/scheduler\n{\"policy\":\"static\",\"load_limit\":10}",
        "GET /v1/events?kind=set",
        "GET /v1/metods",
        "DELETE /v1/process",
        "POST /v1/poll\n[[[[[[",
    ];

    #[test]
    fn every_request_is_answered_with_its_status() {
        let statuses = REQUESTS.map(|request| {
            let (head, body) = request.split_once('\n').unwrap_or((request, ""));
            let (verb, target) = head.split_once(' ').unwrap();
            answer(verb, target, body.as_bytes()).map(|response| response.status)
        });
        let expected = [200, 404, 400, 404, 0, 404, 405, 400];
        assert_eq!(statuses, expected.map(|status| Some(status).filter(|status| *status > 0)));
    }

    #[test]
    fn random_bytes_and_mutated_requests_cause_no_panic() {
        let mut random = Random::new(11);
        for round in 0..3_000 {
            let mut bytes = REQUESTS[round % REQUESTS.len()].as_bytes().to_vec();
            for _ in 0..=random.below(6) {
                let at = usize::try_from(random.below(bytes.len() as u64)).unwrap();
                match random.below(4) {
                    0 => bytes[at] = random.next_u64().to_le_bytes()[0],
                    1 => bytes.truncate(at.max(1)),
                    2 => bytes.insert(at, b'%'),
                    _ => bytes.extend_from_within(at..),
                }
            }
            fuzz_api_request(&bytes);
        }
    }
}
