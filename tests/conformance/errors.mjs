// Every code that the server can send is one that the package knows, with the same status.
import assert from "node:assert/strict";
import test from "node:test";
import { Errors } from "freestyle";

const statuses = JSON.parse(process.env.STATUSES);

test("there are many", () => assert.ok(Object.keys(statuses).length > 50));

for (const [code, status] of Object.entries(statuses)) {
  test(code, () => {
    const error = Errors.errorFromJSON({ code, message: "why" }, "trace");
    assert.equal(error.constructor.code, code);
    assert.equal(error.constructor.statusCode, status);
    assert.equal(Errors[error.name], error.constructor);
    assert.match(error.message, new RegExp(`^${code}: why`));
  });
}
